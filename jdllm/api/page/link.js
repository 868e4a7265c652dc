// The link that reproduces a run. It is in the fragment, which browsers do not send.

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

// What a fragment says, in the same form; null where it says nothing of a run.
export function runOf(fragment) {
  const fields = new URLSearchParams(fragment.slice(1));
  if (!fields.has("mode")) return null;
  const others = [...fields].filter(([name]) => !OWN.includes(name));
  return {
    mode: fields.get("mode"),
    prompt: fields.get("prompt") ?? "",
    context: fields.get("context") ?? "",
    prefilling: parsed(fields.get("prefilling"), {}),
    messages: messagesOf(fields.get("messages")),
    infill: fields.get("infill") ?? "",
    settings: Object.fromEntries(others),
  };
}

function messagesOf(text) {
  const messages = parsed(text, []);
  if (!Array.isArray(messages) || !messages.every((one) => one instanceof Object)) return [];
  return messages.map(({ role, content }) => ({ role: String(role), content: String(content) }));
}

function parsed(text, other) {
  try {
    return JSON.parse(text) ?? other;
  } catch {
    return other;
  }
}
