// The infill editor: a text in which slots are written as ⟦8⟧, so many tokens, or ⟦yes|no⟧, one of these.

import { postJson } from "./api.js";

const SLOT = /⟦([^⟦⟧]*)⟧/g;
const DEFAULT_TOKENS = 8;
const MOST_TOKENS = 2 ** 20;

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

  get slots() {
    return this.parts.filter((part) => typeof part !== "string");
  }

  // What is wrong with the text, in words; null where nothing is.
  get problem() {
    if (/[⟦⟧]/.test(this.value.replace(SLOT, ""))) return "A slot is cut: every ⟦ needs its ⟧ behind it.";
    const { slots } = this;
    if (slots.length === 0) return "Nothing is to be filled: select a part of the text, and mask it.";
    return slots.map(problemOf).find((problem) => problem !== null) ?? null;
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
    this.list.replaceChildren(...this.slots.map(describe));
  }
}

function problemOf({ max_tokens: tokens, options }, index) {
  const slot = `Slot ${index + 1}`;
  if (options?.length === 0) return `${slot} is empty: write texts to choose from, ⟦yes|no⟧, or tokens, ⟦8⟧.`;
  if (tokens === 0) return `${slot} has no tokens: write how many, such as ⟦8⟧.`;
  if (tokens > MOST_TOKENS) return `${slot} is too long: at most ${MOST_TOKENS.toLocaleString("en")} tokens.`;
  return null;
}

function describe(slot) {
  const item = document.createElement("li");
  item.textContent =
    slot.type === "text"
      ? `${slot.max_tokens} ${slot.max_tokens === 1 ? "token" : "tokens"}`
      : `one of: ${slot.options.join(", ") || "no options yet"}`;
  return item;
}
