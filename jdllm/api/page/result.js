// What is shown of a run, while it goes on and afterwards.

import { events, request } from "./api.js";
import { showPassages } from "./context.js";
import { Denoising } from "./denoise.js";
import { plural, showFigures, showSlots } from "./figures.js";
import { Player } from "./player.js";
import { TokenView } from "./view.js";

const element = (id) => document.getElementById(id);
const PARTS = ["finished", "empty", "passages-part", "slots-part", "steps-part", "replay"];
const now = () => performance.now() / 1000;

export class Result {
  constructor() {
    this.view = new TokenView(element("tokens"), element("inspector"));
    const elements = { slider: "slider", button: "play", bars: "bars", label: "frame" };
    const found = Object.fromEntries(Object.entries(elements).map(([name, id]) => [name, element(id)]));
    this.player = new Player(found, (frame) => this.draw(frame));
    this.run = null;
    this.due = null;
    element("heat").addEventListener("change", () => this.showColours());
    element("copy-text").addEventListener("click", () => copy(element("text").textContent, "Text"));
    this.showColours();
  }

  set endTokens(texts) {
    this.view.endTokens = new Set(texts.filter((text) => text !== null));
  }

  // Send a request and show its run. Returns the last event's data; throws where there is none.
  async follow(path, body, signal) {
    this.clear();
    this.context = body.context;
    try {
      const response = await request(path, { method: "POST", body, signal });
      for await (const { name, data } of events(response)) this.take(name, data);
    } finally {
      this.settle();
    }
    return this.last;
  }

  clear() {
    this.run = this.last = null;
    this.view.clear();
    this.player.unload();
    element("text").textContent = "";
    element("slots").replaceChildren();
    for (const id of PARTS) element(id).hidden = true;
  }

  take(name, data) {
    element("result").hidden = false;
    if (name === "start") {
      this.run = new Denoising(data, now());
      element("steps-part").hidden = false;
      this.view.show(this.run);
      showFigures(element("figures"), this.run, 0);
    } else if (name === "step") {
      this.run.take(data, now());
      this.due ??= requestAnimationFrame(() => this.draw(this.run.frames));
    } else if (name === "end") {
      this.last = data;
      this.run?.finish(data);
    }
  }

  draw(frame) {
    cancelAnimationFrame(this.due);
    this.due = null;
    this.view.draw(frame);
    showFigures(element("figures"), this.run, frame);
  }

  // The run is over, in whichever way: its steps can be looked at.
  settle() {
    element("steps-part").hidden = this.run === null;
    if (this.run !== null) {
      this.player.load(this.run);
      element("replay").hidden = false;
      element("heat-last").textContent = `step ${this.run.frames}`;
    }
    if (this.last === null) {
      element("result").hidden = this.run === null;
      return;
    }
    element("text").textContent = this.last.text;
    element("finished").hidden = false;
    element("empty").hidden = this.last.text !== "";
    element("passages-part").hidden = !this.last.prefilling;
    if (this.last.prefilling) {
      showPassages(element("passages"), element("passages-note"), this.context, this.last.prefilling);
    }
    element("slots-part").hidden = !this.last.slots;
    const slots = this.last.slots ?? [];
    showSlots(element("slots"), slots);
    if (this.run !== null) this.view.markChoices(slots.filter(({ type }) => type === "choice"));
  }

  showColours() {
    const heat = element("heat").checked;
    element("tokens").classList.toggle("heat", heat);
    element("legend-heat").hidden = !heat;
    element("legend-confidence").hidden = heat;
  }

  // One sentence on how a run ended.
  get summary() {
    const seconds = this.run?.seconds(this.run.frames) ?? 0;
    const { usage, nfe, slots, finish_reason: reason } = this.last;
    const made = slots ? "" : `, ${plural(usage.completion_tokens, "token")}, finish reason ${reason}`;
    return `Finished in ${seconds.toFixed(2)} s: ${plural(nfe, "forward evaluation")}${made}.`;
  }
}

export async function copy(text, what) {
  const status = element("status");
  try {
    await navigator.clipboard.writeText(text);
    status.textContent = `${what} copied.`;
  } catch {
    status.textContent = `${what} could not be copied: the browser does not allow it.`;
  }
}
