// Requests to the server that the page comes from, its errors and its streams.

import { askForKey, storedKey } from "./key.js";

const UNAUTHORIZED = 401;

export class ApiError extends Error {
  constructor({ message, param = null, code = null }, status = null) {
    super(message);
    this.name = "ApiError";
    this.param = param;
    this.code = code;
    this.status = status;
  }
}

// The response of a request that was answered with success; asks for the API key where one is needed.
export async function request(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const key = storedKey();
    const response = await send(path, { method, body, signal, key });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== UNAUTHORIZED) throw error;
    const changedMeanwhile = storedKey() !== key;
    if (!changedMeanwhile && !(await askForKey(keyMessage(key, error)))) throw error;
  }
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

export function postJson(path, body) {
  return getJson(path, { method: "POST", body });
}

async function send(path, { method, body, signal, key }) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key) headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(path, {
      method,
      headers,
      signal,
      body: body && JSON.stringify(body),
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ message: "The server does not answer: it may have ended, or the connection broke." });
  }
}

function keyMessage(key, error) {
  return key ? "The server did not accept this key." : error.message;
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error, response.status);
  } catch {
    return new ApiError({ message: `The server answered ${response.status}.` }, response.status);
  }
}

// The events of a stream, as { name, data }. Throws what an `error` event says, and where the stream breaks
// off.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) throw new ApiError({ message: "The connection ended before the answer did." });
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const { name, data } = parse(block);
        if (data === "") continue; // a comment, which keeps the connection alive
        if (data === "[DONE]") return;
        const content = JSON.parse(data);
        if (name === "error") throw new ApiError(content.error);
        yield { name, data: content };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ message: "The connection to the server broke." });
  }
}

function parse(block) {
  let name = null;
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice("event: ".length);
    else if (line.startsWith("data: ")) data.push(line.slice("data: ".length));
  }
  return { name, data: data.join("\n") };
}
