// The conversation: what was said so far, and the box for what comes next.

export class Conversation {
  // `elements`: { turns, system, text, restart }.
  constructor(elements) {
    Object.assign(this, elements);
    this.said = [];
    this.restart.addEventListener("click", () => {
      this.said = [];
      this.draw();
      this.text.focus();
    });
    this.draw();
  }

  // What is to be answered, as messages.
  get messages() {
    const system = this.system.value.trim();
    const first = system === "" ? [] : [{ role: "system", content: system }];
    return [...first, ...this.said, { role: "user", content: this.text.value }];
  }

  // Take messages of which the last is the one that is to be answered.
  set messages(messages) {
    const said = [...messages];
    this.system.value = said[0]?.role === "system" ? said.shift().content : "";
    this.text.value = said.at(-1)?.role === "user" ? said.pop().content : "";
    this.said = said;
    this.draw();
  }

  // The message in the box was answered.
  answered(messages, answer) {
    this.said = [...messages.filter(({ role }) => role !== "system"), { role: "assistant", content: answer }];
    this.text.value = "";
    this.draw();
  }

  draw() {
    this.turns.replaceChildren(...this.said.map(turn));
    this.restart.hidden = this.said.length === 0;
  }
}

function turn({ role, content }) {
  const item = document.createElement("li");
  item.className = `turn ${role === "user" ? "user" : "assistant"}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  const text = document.createElement("span");
  text.className = "said";
  text.textContent = content;
  item.append(who, text);
  return item;
}
