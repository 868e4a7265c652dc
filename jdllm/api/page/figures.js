// The figures of a run, and what its slots became.

import { percent } from "./view.js";

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

// `root`: a `dl` whose `dd` elements say in `data-figure` what they show.
export function showFigures(root, run, frame) {
  const committed = run.total(frame);
  const seconds = run.seconds(frame);
  const figures = {
    steps: frame,
    evaluations: run.end?.nfe ?? "–",
    committed: `${committed} / ${run.masks}`,
    perStep: ratio(committed, frame),
    perSecond: ratio(committed, seconds),
    seconds: seconds === 0 ? "–" : `${seconds.toFixed(2)} s`,
    answer: (!run.end?.slots && run.end?.usage.completion_tokens) || "–",
    seed: run.seed,
  };
  for (const cell of root.querySelectorAll("[data-figure]")) cell.textContent = figures[cell.dataset.figure];
}

function ratio(count, by) {
  if (by === 0) return "–";
  const value = count / by;
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 ? 1 : 2);
}

// List the slots of an infilling in `root`, from its last event.
export function showSlots(root, slots) {
  root.replaceChildren(...slots.map(slotItem));
}

function slotItem(slot) {
  const item = document.createElement("li");
  const text = document.createElement("span");
  text.className = "slot-text";
  text.textContent = slot.text;
  item.append(text);
  if (slot.type === "choice") item.append(optionTable(slot));
  else item.append(note(`${plural(slot.token_ids.length, "token")}, ${surety(slot.logprobs)}`));
  return item;
}

function surety(logprobs) {
  const mean = logprobs.reduce((sum, value) => sum + value, 0) / logprobs.length;
  return `confidence ${percent(Math.exp(mean))} in the geometric mean`;
}

function note(text) {
  const element = document.createElement("span");
  element.className = "note";
  element.textContent = text;
  return element;
}

function optionTable({ options, chosen }) {
  const table = document.createElement("table");
  table.className = "options";
  options.forEach((option, i) => {
    const row = table.insertRow();
    row.insertCell().textContent = i === chosen ? "✓" : "";
    row.insertCell().textContent = option.text;
    row.insertCell().append(meter(option.probability));
    row.insertCell().textContent = percent(option.probability);
  });
  return table;
}

function meter(share) {
  const bar = document.createElement("span");
  bar.className = "meter";
  bar.ariaHidden = "true";
  bar.style.setProperty("--share", share);
  return bar;
}
