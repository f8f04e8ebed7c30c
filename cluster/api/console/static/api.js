// Calls to the server, with the keys of this tab.

export const ROOT = new URL("../", import.meta.url);
const NAMES = { operator: "kvrelay-operators-key", tenant: "kvrelay-api-key" };

export function getKey(who) {
  return sessionStorage.getItem(NAMES[who]) ?? "";
}

/** What a call has: where clients have no keys, operators see what is clients' too. */
function keyFor(who) {
  return getKey(who) || (who === "tenant" ? getKey("operator") : "");
}

export function setKey(who, key) {
  if (key) sessionStorage.setItem(NAMES[who], key);
  else sessionStorage.removeItem(NAMES[who]);
}

export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response of a call that went well. `who`: whose key goes with it. */
export async function call(who, method, path, { body, signal } = {}) {
  const headers = {};
  const key = keyFor(who);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method, headers, signal, cache: "no-store", credentials: "omit",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError(0, "The server cannot be reached");
  }
  if (!response.ok) throw new CallError(response.status, await reason(response));
  return response;
}

/** Hands in the ticket of the page's address, once, for a session that is as good as the key. */
export async function beginSession(ticket) {
  const answer = await call("", "POST", "console/session", { body: { ticket } });
  setKey("operator", (await answer.json()).session);
}

export async function getJson(who, path, options) {
  return (await call(who, "GET", path, options)).json();
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

/** The events of a stream as they come: the text of each one's data. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    // Only what is new can hold the end of an event, but for its first line feed.
    let from = Math.max(0, waiting.length - 1);
    waiting += value;
    for (let end = waiting.indexOf("\n\n", from); end >= 0; end = waiting.indexOf("\n\n")) {
      const lines = waiting.slice(0, end).split("\n");
      waiting = waiting.slice(end + 2);
      from = 0;
      const data = lines.filter((line) => line.startsWith("data:"));
      if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
