// The conversation: what was said so far, and the box for what comes next.

const EMPTY = "The answer is empty: the model ended its text at once.";

export class Conversation {
  // `elements`: { turns, system, text, restart }; `onSend` is called where Enter sends what is in the box,
  // `onRegenerate` where the last answer is to be made again.
  constructor(elements, { onSend, onRegenerate }) {
    Object.assign(this, elements);
    this.onRegenerate = onRegenerate;
    this.said = [];
    this.waiting = false;
    this.restart.addEventListener("click", () => {
      this.said = [];
      this.draw();
      this.text.focus();
    });
    this.text.addEventListener("keydown", (event) => {
      const other = event.shiftKey || event.ctrlKey || event.metaKey || event.altKey || event.isComposing;
      if (event.key !== "Enter" || other) return;
      event.preventDefault();
      onSend();
    });
    this.draw();
  }

  // What is to be answered, as messages.
  get messages() {
    const system = this.system.value.trim();
    const first = system === "" ? [] : [{ role: "system", content: system }];
    return [...first, ...this.said];
  }

  // Take messages of which the last is the one that is to be answered.
  set messages(messages) {
    const said = [...messages];
    this.system.value = said[0]?.role === "system" ? said.shift().content : "";
    this.text.value = said.at(-1)?.role === "user" ? said.pop().content : "";
    this.said = said;
    this.draw();
  }

  // The message in the box is said, and waits for its answer.
  send() {
    this.said.push({ role: "user", content: this.text.value });
    this.text.value = "";
    this.wait(true);
  }

  // The last answer is forgotten, and its message waits for another. Returns that answer.
  ask() {
    const { content } = this.said.pop();
    this.wait(true);
    return content;
  }

  answered(content) {
    this.said.push({ role: "assistant", content });
    this.wait(false);
  }

  // There is no answer: the message goes back into the box, before what was written meanwhile.
  unanswered() {
    const { content } = this.said.pop();
    this.text.value = [content, this.text.value].filter((text) => text !== "").join("\n");
    this.wait(false);
  }

  // Take a message back into the box, and forget what came after it.
  edit(index) {
    this.text.value = this.said[index].content;
    this.said.length = index;
    this.draw();
    this.text.focus();
  }

  wait(waiting) {
    this.waiting = waiting;
    this.draw();
  }

  draw() {
    const turns = this.said.map((message, index) => this.turn(message, index));
    if (this.waiting) turns.push(turn("assistant", [note("…")]));
    this.turns.replaceChildren(...turns);
    this.restart.hidden = this.said.length === 0 || this.waiting;
  }

  turn({ role, content }, index) {
    const mine = role === "user";
    const parts = [content === "" && !mine ? note(EMPTY) : said(content)];
    if (!this.waiting && mine) parts.push(action("Edit", () => this.edit(index)));
    if (!this.waiting && !mine && index === this.said.length - 1)
      parts.push(action("Regenerate", this.onRegenerate));
    return turn(role, parts);
  }
}

function turn(role, parts) {
  const item = document.createElement("li");
  item.className = `turn ${role === "user" ? "user" : "assistant"}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  item.append(who, ...parts);
  return item;
}

function said(content) {
  const text = document.createElement("span");
  text.className = "said";
  text.textContent = content;
  return text;
}

function note(content) {
  const text = said(content);
  text.classList.add("note");
  return text;
}

function action(name, act) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet small";
  button.textContent = name;
  button.addEventListener("click", act);
  return button;
}
