// Draws a frame of a run, a span for each position. Text of tokens gets in as text, never as markup.

import { COMMITTED, GIVEN, MASK, PROVISIONAL } from "./denoise.js";

const BLOCK = "░";
const END = "∎";
const NOTHING = "·";
const HINT = "Point at a position, or move over them with the arrow keys.";

export class TokenView {
  // `root`: where the spans go; `inspector`: where a position is described that the user points at.
  constructor(root, inspector) {
    this.root = root;
    this.inspector = inspector;
    this.run = null;
    this.frame = 0;
    this.endTokens = new Set();
    this.cells = [];
    this.drawn = [];
    this.marked = null;
    root.addEventListener("pointerover", (event) => this.point(event.target));
    root.addEventListener("pointerleave", () => this.mark(null));
    root.addEventListener("blur", () => this.mark(null));
    root.addEventListener("keydown", (event) => this.walk(event));
  }

  // Show another run, from its beginning.
  show(run) {
    this.run = run;
    this.drawn = [];
    this.cells = Array.from({ length: run.length }, (_, index) => newCell(index));
    this.root.replaceChildren(...this.cells);
    this.mark(null);
    this.draw(0);
  }

  clear() {
    this.run = null;
    this.cells = [];
    this.root.replaceChildren();
    this.mark(null);
  }

  draw(frame) {
    this.frame = frame;
    this.root.style.setProperty("--frames", Math.max(this.run.frames, 2));
    this.cells.forEach((cell, index) => {
      const entry = this.run.at(index, frame);
      if (this.drawn[index] === entry) return;
      this.drawn[index] = entry;
      this.fill(cell, entry);
    });
    if (this.marked !== null) this.describe();
  }

  // Mark the positions of slots that were filled before the first step.
  markChoices(slots) {
    for (const { start, stop } of slots) {
      for (const cell of this.cells.slice(start - this.run.start, stop - this.run.start))
        cell.dataset.choice = "";
    }
  }

  fill(cell, { state, text, confidence, frame }) {
    const ends = this.endTokens.has(text);
    cell.className = `token ${state}${ends && state !== MASK ? " end" : ""}`;
    cell.textContent = state === MASK ? BLOCK : ends ? END : shown(text, state);
    cell.dataset.step = state === COMMITTED ? frame : "";
    cell.style.setProperty("--confidence", confidence ?? 0);
    cell.style.setProperty("--step", frame);
  }

  point(target) {
    const index = this.cells.indexOf(target);
    if (index >= 0) this.mark(index);
  }

  walk(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (move === undefined || this.cells.length === 0) return;
    event.preventDefault();
    const from = this.marked ?? (move > 0 ? -1 : this.cells.length);
    this.mark(Math.min(Math.max(from + move, 0), this.cells.length - 1));
  }

  mark(index) {
    this.cells[this.marked]?.classList.remove("marked");
    this.marked = index;
    this.cells[index]?.classList.add("marked");
    this.describe();
  }

  describe() {
    this.inspector.textContent = this.marked === null ? HINT : this.description(this.marked);
  }

  description(index) {
    const { state, text, confidence, frame } = this.run.at(index, this.frame);
    const place = `Position ${this.run.start + index}`;
    if (state === MASK) return `${place}: masked, not evaluated yet`;
    if (state === GIVEN) return `${place}: ${JSON.stringify(text)}, given`;
    const how = state === PROVISIONAL ? "provisional since" : "committed in";
    return `${place}: ${JSON.stringify(text)}, ${how} step ${frame}, confidence ${percent(confidence)}`;
  }
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

function newCell(index) {
  const cell = document.createElement("span");
  cell.dataset.index = index;
  return cell;
}

// Line breaks are shown, but break the line only where they will stay.
function shown(text, state) {
  if (text === "") return NOTHING;
  return text.replaceAll("\n", state === PROVISIONAL ? "↵" : "↵\n");
}
