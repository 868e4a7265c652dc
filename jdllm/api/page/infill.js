// The infill editor: a text in which slots are written as ⟦8⟧, so many tokens, or ⟦yes|no⟧, one of these.

import { postJson } from "./api.js";

const SLOT = /⟦([^⟦⟧]*)⟧/g;
const DEFAULT_TOKENS = 8;

// A text as the parts that the server takes.
export function partsOf(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(SLOT)) {
    if (match.index > from) parts.push(text.slice(from, match.index));
    parts.push(slotOf(match[1]));
    from = match.index + match[0].length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
}

function slotOf(content) {
  if (/^\d+$/.test(content.trim())) return { type: "text", max_tokens: Number(content) };
  return { type: "choice", options: content.split("|").filter((option) => option !== "") };
}

export class InfillEditor {
  // `elements`: { text, mask, choice, list }; `onError` is told what goes wrong.
  constructor(elements, onError) {
    Object.assign(this, elements);
    this.onError = onError;
    this.mask.addEventListener("click", () => this.maskSelection().catch(onError));
    this.choice.addEventListener("click", () => this.makeChoice());
    this.text.addEventListener("input", () => this.showSlots());
  }

  get value() {
    return this.text.value;
  }

  set value(text) {
    this.text.value = text;
    this.showSlots();
  }

  get parts() {
    return partsOf(this.value);
  }

  get hasSlots() {
    return this.parts.some((part) => typeof part !== "string");
  }

  // The selected span becomes a slot of as many tokens as it has.
  async maskSelection() {
    const { selectionStart: start, selectionEnd: end, value } = this.text;
    const chosen = value.slice(start, end);
    const tokens = chosen === "" ? DEFAULT_TOKENS : (await postJson("tokenize", { prompt: chosen })).count;
    if (this.text.value === value) this.replace(start, end, `⟦${tokens}⟧`);
  }

  // The selected span becomes the first of the options; the caret waits for the next one.
  makeChoice() {
    const { selectionStart: start, selectionEnd: end, value } = this.text;
    this.replace(start, end, `⟦${value.slice(start, end)}|⟧`, -1);
  }

  replace(start, end, text, caret = 0) {
    this.text.setRangeText(text, start, end, "end");
    const at = start + text.length + caret;
    this.text.setSelectionRange(at, at);
    this.text.focus();
    this.showSlots();
  }

  showSlots() {
    const slots = this.parts.filter((part) => typeof part !== "string");
    this.list.replaceChildren(...slots.map(describe));
  }
}

function describe(slot) {
  const item = document.createElement("li");
  item.textContent =
    slot.type === "text"
      ? `${slot.max_tokens} ${slot.max_tokens === 1 ? "token" : "tokens"}`
      : `one of: ${slot.options.join(", ") || "no options yet"}`;
  return item;
}
