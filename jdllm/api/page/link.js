// The link that reproduces a run. It is in the fragment, which browsers do not send.

const MODES = ["complete", "chat", "infill"];
const OWN = ["mode", "prompt", "context", "prefilling", "messages", "infill"];

// `run`: { mode, settings, prompt (with context and prefilling, where it has one) or messages or infill }.
export function fragmentOf({ mode, settings, prompt, context, prefilling, messages, infill }) {
  const fields = new URLSearchParams({ mode });
  if (prompt !== undefined) fields.set("prompt", prompt);
  if (context !== undefined) fields.set("context", context);
  if (prefilling !== undefined) fields.set("prefilling", JSON.stringify(prefilling));
  if (messages !== undefined) fields.set("messages", JSON.stringify(messages));
  if (infill !== undefined) fields.set("infill", infill);
  for (const [name, value] of Object.entries(settings)) fields.set(name, value);
  return `#${fields}`;
}

// What a fragment says, in the same form; null where it says nothing of a run. Throws where it is broken.
export function runOf(fragment) {
  const fields = new URLSearchParams(fragment.slice(1));
  if (!fragment.includes("=")) return null;
  if (!MODES.includes(fields.get("mode"))) throw broken("mode");
  const others = [...fields].filter(([name]) => !OWN.includes(name));
  return {
    mode: fields.get("mode"),
    prompt: fields.get("prompt") ?? "",
    context: fields.get("context") ?? "",
    prefilling: prefillingOf(fields.get("prefilling")),
    messages: messagesOf(fields.get("messages")),
    infill: fields.get("infill") ?? "",
    settings: Object.fromEntries(others),
  };
}

function prefillingOf(text) {
  const fields = parsed("prefilling", text) ?? {};
  if (fields.constructor !== Object) throw broken("prefilling");
  return fields;
}

function messagesOf(text) {
  const messages = parsed("messages", text) ?? [];
  const isMessage = (one) => typeof one?.role === "string" && typeof one.content === "string";
  if (!Array.isArray(messages) || !messages.every(isMessage)) throw broken("messages");
  return messages.map(({ role, content }) => ({ role, content }));
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw broken(name);
  }
}

function broken(name) {
  return new Error(`This link is broken: its ${name} cannot be read. Copy it once more, whole.`);
}
