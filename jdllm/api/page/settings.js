// The sampler and cache settings: fields as the server's own schema describes them, and presets.

const GROUPS = {
  Length: ["gen_length", "steps", "block_length"],
  Tokens: ["temperature", "top_p", "top_k", "cfg_scale", "seed"],
  Order: ["alg", "transfer", "threshold", "factor", "entropy_bound", "remasking"],
  Cache: ["cache", "retention", "refresh_delay"],
};
// Wherever a text is filled in, its masks say how long the result is.
const LENGTHS = GROUPS.Length;
// What a preset leaves as it is.
const KEPT = ["gen_length", "steps", "seed"];

const drawn = (values) => values.temperature > 0 || values.alg !== undefined;
const scored = (values) => values.cache === "sparse" || values.cache === "head_sparse";
const cached = (values) => values.cache !== undefined && values.cache !== "none";
// When a field has an effect; the server refuses it elsewhere.
const USED = {
  threshold: (values) => values.transfer === "threshold" || values.alg === "confidence_threshold",
  factor: (values) => values.transfer === "factor",
  entropy_bound: (values) => values.transfer === "entropy_bound",
  retention: scored,
  refresh_delay: cached,
  top_p: drawn,
  top_k: drawn,
};

const PRESETS = {
  "Server's defaults": {},
  "LLaDA, official": { block_length: 32, temperature: 0, transfer: "schedule", remasking: "low_confidence" },
  "Fast-dLLM: threshold, dual cache": {
    block_length: 32,
    transfer: "threshold",
    threshold: 0.9,
    cache: "dual",
  },
  "Fast-dLLM: factor, prefix cache": { block_length: 32, transfer: "factor", factor: 1, cache: "prefix" },
  "dLLM-Serve: head-sparse cache": { block_length: 32, cache: "head_sparse", retention: 0.5 },
  "dKV-Cache: selective cache": { block_length: 32, cache: "selective" },
  "EB sampler: entropy bound": { block_length: 32, transfer: "entropy_bound", entropy_bound: 0.1 },
  "Dream, official: entropy": { alg: "entropy", temperature: 0.2, top_p: 0.95 },
};
const CUSTOM = "Custom";

export class Settings {
  // `root`: an element for the fields; `preset`: a select element.
  constructor(root, preset) {
    this.root = root;
    this.preset = preset;
    this.fields = {};
    preset.append(...Object.keys(PRESETS).map((name) => new Option(name)), new Option(CUSTOM));
    preset.addEventListener("change", () => this.usePreset(preset.value));
    root.addEventListener("input", () => this.refresh());
  }

  // Make the fields from the schema of a request, as it stands in the server's OpenAPI document.
  build(schema) {
    for (const [title, names] of Object.entries(GROUPS)) {
      const known = names.filter((name) => name in schema.properties);
      this.root.append(
        group(
          title,
          known.map((name) => this.field(name, schema.properties[name])),
        ),
      );
    }
    this.refresh();
  }

  field(name, property) {
    const kind = property.anyOf?.find((one) => one.type !== "null") ?? property;
    const input = kind.enum ? choice(kind.enum) : number(kind);
    input.id = `setting-${name}`;
    input.name = name;
    if (name === "seed") input.placeholder = "random";
    const label = document.createElement("label");
    label.htmlFor = input.id;
    label.textContent = name;
    if (property.description) label.title = input.ariaDescription = property.description;
    const row = document.createElement("div");
    row.className = "field";
    row.append(label, input);
    this.fields[name] = input;
    return row;
  }

  // What the user has set, by name; a field without an effect is left out, as are lengths of an infilling.
  values({ infill = false } = {}) {
    const set = this.entered();
    const left = Object.entries(set).filter(
      ([name]) => !(infill && LENGTHS.includes(name)) && (USED[name]?.(set) ?? true),
    );
    return Object.fromEntries(left);
  }

  entered() {
    const values = {};
    for (const [name, input] of Object.entries(this.fields)) {
      if (input.value !== "") values[name] = input.type === "number" ? input.valueAsNumber : input.value;
    }
    return values;
  }

  // Set these values and empty all other fields; names that are no fields are ignored.
  set(values) {
    for (const [name, input] of Object.entries(this.fields)) input.value = values[name] ?? "";
    this.refresh();
  }

  usePreset(name) {
    if (name === CUSTOM) return;
    const kept = Object.entries(this.entered()).filter(([field]) => KEPT.includes(field));
    this.set({ ...Object.fromEntries(kept), ...PRESETS[name] });
  }

  // Whether every number is in its bounds; otherwise the browser says so at the field.
  check() {
    if (this.root.checkValidity()) return true;
    this.root.closest("details").open = true; // else the browser has nowhere to say it
    return this.root.reportValidity();
  }

  useLengths(used) {
    for (const name of LENGTHS) this.fields[name]?.closest(".field").classList.toggle("unused", !used);
    this.refresh();
  }

  refresh() {
    const values = this.entered();
    for (const [name, input] of Object.entries(this.fields)) {
      const unused = input.closest(".field").classList.contains("unused");
      input.disabled = unused || !(USED[name]?.(values) ?? true);
    }
    this.preset.value = this.presetOf(values);
  }

  presetOf(values) {
    const own = Object.entries(values).filter(([name]) => !KEPT.includes(name));
    const same = ([, preset]) =>
      own.length === Object.keys(preset).length && own.every(([name, value]) => preset[name] === value);
    return Object.entries(PRESETS).find(same)?.[0] ?? CUSTOM;
  }
}

function group(title, rows) {
  const fieldset = document.createElement("fieldset");
  const legend = document.createElement("legend");
  legend.textContent = title;
  fieldset.append(legend, ...rows);
  return fieldset;
}

function choice(options) {
  const select = document.createElement("select");
  select.append(new Option("default", ""), ...options.map((option) => new Option(option)));
  return select;
}

function number(kind) {
  const input = document.createElement("input");
  input.type = "number";
  input.placeholder = "default";
  input.step = kind.type === "integer" ? "1" : "any";
  const most = kind.maximum ?? (kind.exclusiveMaximum === undefined ? undefined : kind.exclusiveMaximum - 1);
  if (kind.minimum !== undefined) input.min = kind.minimum;
  if (most !== undefined) input.max = Math.min(most, Number.MAX_SAFE_INTEGER);
  return input;
}
