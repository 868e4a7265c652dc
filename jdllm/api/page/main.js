// The page that generates: reads what is asked, runs it, and keeps the link that reproduces it.

import { getJson } from "./api.js";
import { Conversation } from "./chat.js";
import { ContextEditor } from "./context.js";
import { Examples } from "./examples.js";
import { InfillEditor, partsOf } from "./infill.js";
import { fragmentOf, runOf } from "./link.js";
import { Result, copy } from "./result.js";
import { Settings } from "./settings.js";
import { Tabs } from "./tabs.js";

const element = (id) => document.getElementById(id);
const PATHS = { complete: "v1/completions", chat: "v1/chat/completions", infill: "v1/infill" };
const BOXES = { complete: "prompt", chat: "message", infill: "infill-text" };
const VERBS = { complete: "Generate", chat: "Send", infill: "Fill" };
const WIDE = matchMedia("(min-width: 60rem)");
const AGAIN = 2000;

const result = new Result();
const settings = new Settings(element("fields"), element("preset"));
const chat = new Conversation(
  {
    turns: element("turns"),
    system: element("system"),
    text: element("message"),
    restart: element("restart"),
  },
  { onSend: run, onRegenerate: regenerate },
);
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
const examples = new Examples(element("examples"), (text) => {
  const box = element(BOXES[tabs.mode]);
  box.value = text;
  box.dispatchEvent(new Event("input"));
  box.focus();
});
const tabs = new Tabs(element("tabs"), (mode) => {
  settings.useLengths(mode !== "infill");
  examples.show(mode);
  element("run").textContent = VERBS[mode];
  element("keys-chat").hidden = mode !== "chat";
  element("keys-other").hidden = mode === "chat";
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

// What is wrong with the box, in words; null where nothing is.
function problem() {
  if (tabs.mode === "infill") return infill.problem;
  return element(BOXES[tabs.mode]).value === "" ? "Write something first." : null;
}

function ready() {
  if (element("run").disabled || running !== null || !settings.check()) return false;
  showError(null);
  return true;
}

async function run() {
  if (!ready()) return;
  const message = problem();
  if (message !== null) {
    showError({ message });
    element(BOXES[tabs.mode]).focus();
    return;
  }
  if (tabs.mode === "chat") chat.send();
  await follow(asked(), { failed: () => chat.unanswered() });
}

// Answer the last message of the conversation anew.
async function regenerate() {
  if (!ready()) return;
  const before = chat.ask();
  const answer = await follow(asked(), { failed: () => chat.answered(before) });
  if (answer === before) showStatus(`${result.summary} It is the same again: a temperature, and no seed, draw others.`);
}

// Run what is asked, and show it. Returns the text of the answer, null where there is none: of a conversation
// `failed` is called then.
async function follow(what, { failed }) {
  history.replaceState(null, "", fragmentOf(what));
  setRunning(new AbortController());
  showStatus("Running …");
  if (!WIDE.matches) element("status").scrollIntoView();
  try {
    const last = await result.follow(PATHS[what.mode], bodyOf(what), running.signal);
    if (what.mode === "chat") chat.answered(last.text);
    showStatus(result.summary);
    return last.text;
  } catch (error) {
    if (what.mode === "chat") failed();
    if (error.name === "AbortError") showStatus("Stopped.");
    else showError(error);
    return null;
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
  try {
    fillIn(runOf(location.hash));
  } catch (error) {
    showError(error);
  }
}

function fillIn(linked) {
  if (linked === null) return;
  element("prompt").value = linked.prompt;
  context.value = linked;
  chat.messages = linked.messages;
  infill.value = linked.infill;
  tabs.choose(linked.mode);
  const unknown = settings.set(linked.settings);
  if (unknown.length > 0)
    throw new Error(`The link has settings that this server does not take: ${unknown.join(", ")}.`);
  showError(null);
  showStatus("The link's text, settings and seed are filled in: run it to see the same again.");
}

async function connect() {
  const [api, told, models, tokenizer] = await Promise.all([
    getJson("openapi.json"),
    getJson("page/settings.json"),
    getJson("v1/models"),
    getJson("tokenizer_info").catch(() => ({})),
  ]);
  const [model] = models.data;
  const length = model.max_model_len.toLocaleString("en");
  element("model").textContent = `${model.id} · ${model.family} · up to ${length} tokens`;
  result.endTokens = [tokenizer.eos_token ?? null, tokenizer.eot_token ?? null];
  settings.build(api.components.schemas.CompletionRequest, told.sampling);
  context.build(told.prefilling);
  examples.texts = told.examples;
}

// Connect, however long it takes until somebody answers.
async function start() {
  try {
    await connect();
  } catch (error) {
    showError(error);
    if (error.status === null) setTimeout(start, AGAIN);
    return;
  }
  showError(null);
  element("run").disabled = false;
  tabs.choose("complete");
  openLink();
  window.addEventListener("hashchange", openLink);
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

start();
