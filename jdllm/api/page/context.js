// A long context beside a prompt: how it is prepared, and which of its passages were kept.

const OVERRIDES = { chunk_length: "chunkLength", chunks_kept: "chunksKept" };

export class ContextEditor {
  // `elements`: part (details), text, preset (select), chunkLength and chunksKept (inputs).
  constructor(elements) {
    Object.assign(this, elements);
  }

  // Offer the server's presets: their fields by their names.
  build(presets) {
    this.presets = presets;
    this.preset.append(...Object.keys(presets).map((name) => new Option(name)));
    this.preset.addEventListener("change", () => this.showPreset());
    this.showPreset();
  }

  // What holds where nothing is entered.
  showPreset() {
    const fields = this.presets[this.preset.value];
    for (const [name, id] of Object.entries(OVERRIDES)) this[id].placeholder = fields?.[name] ?? "";
  }

  // What a request says of it: nothing where there is none.
  get value() {
    if (this.text.value === "") return {};
    const prefilling = { preset: this.preset.value };
    for (const [name, id] of Object.entries(OVERRIDES)) {
      if (this[id].value !== "") prefilling[name] = this[id].valueAsNumber;
    }
    return { context: this.text.value, prefilling };
  }

  set value({ context = "", prefilling = {} }) {
    this.text.value = context;
    this.part.open = context !== "";
    if (prefilling.preset in this.presets) this.preset.value = prefilling.preset;
    this.showPreset();
    for (const [name, id] of Object.entries(OVERRIDES)) this[id].value = prefilling[name] ?? "";
  }
}

// The context in `root`, with the passages that were kept marked; `note` tells how many they are.
export function showPassages(root, note, context, { passages, selected, scores }) {
  const nodes = [];
  let at = 0;
  passages.forEach(([start, stop], i) => {
    const mark = document.createElement("mark");
    mark.textContent = context.slice(start, stop);
    mark.title = `chunk ${selected[i] + 1}, score ${scores[selected[i]]?.toFixed(3) ?? "none"}`;
    nodes.push(context.slice(at, start), mark);
    at = stop;
  });
  root.replaceChildren(...nodes, context.slice(at));
  note.textContent = `${selected.length} of ${scores.length} chunks were kept.`;
}
