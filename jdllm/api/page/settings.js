// The sampler and cache settings: fields as the server's own schema describes them, what holds where nothing is
// entered, and presets.

const GROUPS = {
  Length: ["gen_length", "steps", "block_length"],
  Tokens: ["temperature", "top_p", "top_k", "cfg_scale", "seed"],
  Order: ["alg", "transfer", "threshold", "factor", "entropy_bound", "remasking"],
  Cache: ["cache", "retention", "refresh_delay", "suffix_window"],
};
// Wherever a text is filled in, its masks say how long the result is.
const LENGTHS = GROUPS.Length;
// What a preset leaves as it is.
const KEPT = ["gen_length", "steps", "seed"];

const drawn = (values) => values.temperature > 0 || values.alg !== undefined;
// When a field has an effect, where the schema does not say that (`x-used-when`).
const USED = { top_p: drawn, top_k: drawn };
// The group of an option that only some values of these fields use.
const GROUP_OF = { transfer: "Order", alg: "Order", cache: "Cache" };

// What holds where neither the user nor the server has set a value.
const OTHERWISE = {
  steps: (values) => values.gen_length,
  block_length: (values) => values.gen_length,
  top_p: () => "off",
  top_k: () => "off",
  seed: () => "random",
  suffix_window: () => "all",
  alg: () => "none",
};
const DESCRIBED = /\[default: (.+)\]/;

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
  "LLaDA guide: prompt cache": { block_length: 32, cache: "prompt" },
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
    this.defaults = {};
    this.chosen = null;
    preset.append(...Object.keys(PRESETS).map((name) => new Option(name)), new Option(CUSTOM));
    preset.addEventListener("change", () => this.usePreset(preset.value));
    root.addEventListener("input", () => this.refresh());
  }

  // Make the fields from the schema of a request, as it stands in the server's OpenAPI document; `sampling` is
  // what holds on this server, by name.
  build(schema, sampling) {
    this.schema = schema;
    // Without a seed the server draws one.
    this.defaults = Object.fromEntries(
      Object.entries(sampling).filter(([name, value]) => value !== null && name !== "seed"),
    );
    for (const [title, names] of Object.entries(GROUPS)) {
      const known = [...names, ...this.others(title)].filter((name) => name in schema.properties);
      this.root.append(
        group(
          title,
          known.map((name) => this.field(name, schema.properties[name])),
        ),
      );
    }
    this.refresh();
  }

  // Options of rules and caches that no group lists, such as those that were registered for this server.
  others(title) {
    const listed = Object.values(GROUPS).flat();
    const belongs = ([name, property]) =>
      property["x-offered"] && !listed.includes(name) && GROUP_OF[Object.keys(property["x-used-when"])[0]] === title;
    return Object.entries(this.schema.properties).filter(belongs).map(([name]) => name);
  }

  // Whether a field has an effect; the server refuses it elsewhere.
  used(name, all) {
    const when = this.schema.properties[name]["x-used-when"];
    if (when === undefined) return USED[name]?.(all) ?? true;
    return Object.entries(when).some(([field, values]) => values.includes(all[field]));
  }

  field(name, property) {
    const kind = property.anyOf?.find((one) => one.type !== "null") ?? property;
    const input = kind.enum ? choice(kind.enum) : number(kind);
    input.id = `setting-${name}`;
    input.name = name;
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
    const all = this.effective();
    const left = Object.entries(this.entered()).filter(
      ([name]) => !(infill && LENGTHS.includes(name)) && this.used(name, all),
    );
    return Object.fromEntries(left);
  }

  // What holds: what is entered, and else what the server does.
  effective(entered = this.entered()) {
    const { steps, ...others } = this.defaults;
    // As many steps as tokens, where only the tokens are given.
    const defaults = entered.gen_length === undefined ? this.defaults : others;
    return { ...defaults, ...entered };
  }

  // What holds of a field where nothing is entered, for the eye.
  otherwise(name, values) {
    const { [name]: _, ...entered } = values;
    const all = this.effective(entered);
    const property = this.schema.properties[name];
    const described = property.description?.match(DESCRIBED)?.[1];
    const chosen = Object.entries(property["x-default-when"] ?? {}).map(([field, values]) => values[all[field]]);
    const own = OTHERWISE[name]?.(all) ?? chosen.find((value) => value !== undefined);
    return String(all[name] ?? own ?? described ?? "none");
  }

  entered() {
    const values = {};
    for (const [name, input] of Object.entries(this.fields)) {
      if (input.value !== "") values[name] = input.type === "number" ? input.valueAsNumber : input.value;
    }
    return values;
  }

  // Set these values and empty all other fields. Returns the names that are no fields, or cannot be so.
  set(values) {
    const isDefault = (name, value) => this.fields[name]?.tagName === "SELECT" && this.defaults[name] === value;
    const own = Object.entries(values).filter((entry) => !isDefault(...entry));
    const named = Object.fromEntries(own);
    for (const [name, input] of Object.entries(this.fields)) input.value = named[name] ?? "";
    this.refresh();
    return own.filter(([name, value]) => this.fields[name]?.value !== String(value)).map(([name]) => name);
  }

  usePreset(name) {
    if (name === CUSTOM) return;
    const kept = Object.entries(this.entered()).filter(([field]) => KEPT.includes(field));
    this.chosen = name;
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
    const all = this.effective(values);
    for (const [name, input] of Object.entries(this.fields)) {
      const unused = input.closest(".field").classList.contains("unused");
      input.disabled = unused || !this.used(name, all);
      showOtherwise(input, this.otherwise(name, values));
    }
    this.preset.value = this.presetOf(values);
  }

  // The preset that says the same, the chosen one rather than another.
  presetOf(values) {
    const all = this.effective(values);
    const names = Object.keys(this.fields).filter((name) => !KEPT.includes(name));
    const same = (preset) => {
      const other = this.effective(PRESETS[preset]);
      return names.every((name) => all[name] === other[name]);
    };
    return [this.chosen, ...Object.keys(PRESETS)].find((name) => name in PRESETS && same(name)) ?? CUSTOM;
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
  select.append(new Option("", ""), ...options.map((option) => new Option(option)));
  return select;
}

// Show what holds while nothing is entered; a choice is not offered twice.
function showOtherwise(input, text) {
  if (input.tagName !== "SELECT") {
    input.placeholder = text;
    return;
  }
  const [empty, ...options] = input.options;
  empty.textContent = text;
  for (const option of options) option.hidden = option.value === text && !option.selected;
}

function number(kind) {
  const input = document.createElement("input");
  input.type = "number";
  input.step = kind.type === "integer" ? "1" : "any";
  const most = kind.maximum ?? (kind.exclusiveMaximum === undefined ? undefined : kind.exclusiveMaximum - 1);
  if (kind.minimum !== undefined) input.min = kind.minimum;
  if (most !== undefined) input.max = Math.min(most, Number.MAX_SAFE_INTEGER);
  return input;
}
