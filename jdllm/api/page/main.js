// The page that generates: reads what is asked, runs it, and keeps the link that reproduces it.

import { getJson } from "./api.js";
import { Conversation } from "./chat.js";
import { ContextEditor } from "./context.js";
import { InfillEditor, partsOf } from "./infill.js";
import { fragmentOf, runOf } from "./link.js";
import { Result, copy } from "./result.js";
import { Settings } from "./settings.js";
import { Tabs } from "./tabs.js";

const element = (id) => document.getElementById(id);
const PATHS = { complete: "v1/completions", chat: "v1/chat/completions", infill: "v1/infill" };
const WIDE = matchMedia("(min-width: 60rem)");

const result = new Result();
const settings = new Settings(element("fields"), element("preset"));
const chat = new Conversation({
  turns: element("turns"),
  system: element("system"),
  text: element("message"),
  restart: element("restart"),
});
const infill = new InfillEditor(
  {
    text: element("infill-text"),
    mask: element("mask"),
    choice: element("choice"),
    list: element("infill-slots"),
  },
  showError,
);
const context = new ContextEditor({
  part: element("context-part"),
  text: element("context"),
  preset: element("prefilling"),
  chunkLength: element("chunk-length"),
  chunksKept: element("chunks-kept"),
});
const tabs = new Tabs(element("tabs"), (mode) => {
  settings.useLengths(mode !== "infill");
  element("run").textContent = mode === "infill" ? "Fill" : mode === "chat" ? "Send" : "Generate";
});
let running = null;

function showStatus(text) {
  element("status").textContent = text;
}

function showError(error) {
  showStatus("");
  element("error").textContent = error?.message ?? "";
}

// What is asked now, as a link keeps it.
function asked() {
  const { mode } = tabs;
  const own = {
    complete: { prompt: element("prompt").value, ...context.value },
    chat: { messages: chat.messages },
    infill: { infill: infill.value },
  };
  return {
    mode,
    settings: { ...settings.values({ infill: mode === "infill" }), seed: seed() },
    ...own[mode],
  };
}

function seed() {
  const entered = settings.entered().seed;
  return entered ?? crypto.getRandomValues(new Uint32Array(1))[0];
}

function bodyOf(run) {
  const own = {
    complete: () => ({ prompt: run.prompt, context: run.context, prefilling: run.prefilling }),
    chat: () => ({ messages: run.messages }),
    infill: () => ({ parts: partsOf(run.infill) }),
  };
  return { ...own[run.mode](), ...run.settings, stream: true, stream_mode: "denoise" };
}

// What is missing, and where; null where nothing is.
function missing() {
  if (tabs.mode === "infill") return infill.hasSlots ? null : ["infill-text", "Mask something first."];
  const id = tabs.mode === "chat" ? "message" : "prompt";
  return element(id).value === "" ? [id, "Write something first."] : null;
}

async function run() {
  if (running !== null || !settings.check()) return;
  showError(null);
  const lack = missing();
  if (lack !== null) {
    showError({ message: lack[1] });
    element(lack[0]).focus();
    return;
  }
  const what = asked();
  history.replaceState(null, "", fragmentOf(what));
  setRunning(new AbortController());
  showStatus("Denoising …");
  if (!WIDE.matches) element("status").scrollIntoView();
  try {
    const last = await result.follow(PATHS[what.mode], bodyOf(what), running.signal);
    if (what.mode === "chat") chat.answered(what.messages, last.text);
    showStatus(result.summary);
  } catch (error) {
    if (error.name === "AbortError") showStatus("Cancelled.");
    else showError(error);
  } finally {
    setRunning(null);
  }
}

function setRunning(controller) {
  running = controller;
  swap(...(controller === null ? ["cancel", "run"] : ["run", "cancel"]));
  element("tokens").ariaBusy = String(controller !== null);
}

// Show one button in place of another, and let it have the focus too.
function swap(old, other) {
  const focused = document.activeElement === element(old);
  element(old).hidden = true;
  element(other).hidden = false;
  if (focused) element(other).focus();
}

function openLink() {
  const linked = runOf(location.hash);
  if (linked === null) return;
  element("prompt").value = linked.prompt;
  context.value = linked;
  chat.messages = linked.messages;
  infill.value = linked.infill;
  tabs.choose(linked.mode);
  settings.set(linked.settings);
  showStatus("The link's text, settings and seed are filled in: run it to see the same again.");
}

async function connect() {
  const [api, models, tokenizer] = await Promise.all([
    getJson("openapi.json"),
    getJson("v1/models"),
    getJson("tokenizer_info").catch(() => ({})),
  ]);
  const [model] = models.data;
  const length = model.max_model_len.toLocaleString("en");
  element("model").textContent = `${model.id} · ${model.family} · up to ${length} tokens`;
  result.endTokens = [tokenizer.eos_token ?? null, tokenizer.eot_token ?? null];
  settings.build(api.components.schemas.CompletionRequest);
  context.build(api.components.schemas.CompletionRequest);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  else if (event.key === "Escape") running?.abort();
});
element("run").addEventListener("click", run);
element("cancel").addEventListener("click", () => running?.abort());
element("copy-link").addEventListener("click", () => copy(location.href, "Link"));
const unfold = () => {
  element("settings").open = WIDE.matches;
};
WIDE.addEventListener("change", unfold);
unfold();

try {
  await connect();
  element("run").disabled = false;
  tabs.choose("complete");
  openLink();
  window.addEventListener("hashchange", openLink);
} catch (error) {
  showError(error);
}
