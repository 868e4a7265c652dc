// Texts that show what the model can do, which the server names for each mode.

export class Examples {
  // `root`: where the buttons go; `onChoose` is called with the text of the one that was pressed.
  constructor(root, onChoose) {
    this.root = root;
    this.onChoose = onChoose;
    this.texts = {};
  }

  show(mode) {
    const buttons = (this.texts[mode] ?? []).map((text) => this.button(text));
    this.root.querySelectorAll("button").forEach((button) => button.remove());
    this.root.append(...buttons);
    this.root.hidden = buttons.length === 0;
  }

  button(text) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = button.title = text;
    button.addEventListener("click", () => this.onChoose(text));
    return button;
  }
}
