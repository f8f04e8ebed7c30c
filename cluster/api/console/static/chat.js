// A place to chat: the same streaming call as any client's, with its figures below each answer.

import { call, events, getKey } from "./api.js";
import { count, h, seconds } from "./dom.js";
import { store } from "./store.js";

const history = []; // turns that are whole: {role, content, meta}
const settings = { model: "", session: "", system: "", max_tokens: "512", temperature: "" };

export function chat() {
  let stop = null; // of the answer that is coming
  const log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const text = h("textarea", {
    rows: "1", placeholder: "Ask the model", "aria-label": "Message",
    on: {
      input: grow,
      keydown: (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        form.requestSubmit();
      },
    },
  });
  const send = h("button", { class: "button primary", type: "submit", text: "Send" });
  const form = h("form", {
    class: "ask",
    on: {
      submit: (event) => {
        event.preventDefault();
        if (stop) stop.abort();
        else if (text.value.trim()) ask(text.value.trim());
      },
    },
  }, text, send);
  const reset = h("button", {
    class: "button", type: "button", text: "New chat",
    on: {
      click: () => {
        stop?.abort();
        history.length = 0;
        draw();
        text.focus();
      },
    },
  });
  const element = h("div", { class: "fill" },
    h("div", { class: "head" }, h("h1", { text: "Chat" }), h("span", { class: "grow" }), reset),
    h("div", { class: "chat" },
      h("section", { class: "panel talk" }, log, form), settingsPart()));

  function grow() {
    text.style.setProperty("height", "auto");
    text.style.setProperty("height", `${Math.min(180, text.scrollHeight + 2)}px`);
  }

  function draw() {
    log.replaceChildren(...history.map(turn));
    if (!history.length) {
      log.append(h("p", { class: "welcome muted", text: "Each answer says how long its first token "
        + "took and how much of the prompt was cached. A session's name keeps its KV between turns." }));
    }
  }

  async function ask(question) {
    const asked = { role: "user", content: question };
    const answer = { role: "assistant", content: "", meta: null };
    text.value = "";
    grow();
    if (!history.length) log.replaceChildren();
    const said = turn(answer);
    said.classList.add("coming");
    log.append(turn(asked), said);
    log.scrollTop = log.scrollHeight;
    stop = new AbortController();
    send.textContent = "Stop";
    const content = said.querySelector(".content");
    let problem = "";
    try {
      await stream([...history, asked], answer, content, log, stop.signal);
    } catch (error) {
      problem = error.name === "AbortError" ? "Stopped" : error.message;
    }
    stop = null;
    send.textContent = "Send";
    said.classList.remove("coming");
    if (problem) said.append(h("p", { class: "notice bad", role: "alert", text: problem }));
    if (answer.meta) said.append(metaPart(answer.meta));
    // A turn without an answer is asked again, not kept.
    if (answer.content) history.push(asked, answer);
    log.scrollTop = log.scrollHeight;
  }

  draw();
  return { element, update() {}, start: () => text.focus({ preventScroll: true }),
    stop: () => stop?.abort() };
}

async function stream(turns, answer, content, log, signal) {
  const began = performance.now();
  let first = null;
  let usage = null;
  const response = await call("tenant", "POST", "v1/chat/completions", {
    body: body(turns), signal,
  });
  const id = response.headers.get("x-request-id");
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices ?? []) {
      const more = choice.delta?.content ?? "";
      if (!more) continue;
      first ??= performance.now();
      answer.content += more;
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      content.append(more);
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
  }
  const after = (performance.now() - (first ?? began)) / 1000;
  answer.meta = { id, ttft: first === null ? null : (first - began) / 1000, after, usage };
}

function body(turns) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const messages = turns.map(({ role, content }) => ({ role, content }));
  const asked = {
    model: settings.model || store.model || store.parts.server?.models[0],
    messages: [...system, ...messages], stream: true, stream_options: { include_usage: true },
  };
  if (settings.max_tokens) asked.max_tokens = Number(settings.max_tokens);
  if (settings.temperature !== "") asked.temperature = Number(settings.temperature);
  if (settings.session) asked.prompt_cache_key = settings.session;
  return asked;
}

function turn(each) {
  const isUser = each.role === "user";
  return h("div", { class: `turn ${each.role}` },
    h("span", { class: "hidden-text", text: isUser ? "You" : "Model" }),
    h("div", { class: "content", text: each.content }),
    each.meta ? metaPart(each.meta) : null);
}

function metaPart({ id, ttft, after, usage }) {
  const parts = [`first token ${seconds(ttft)}`];
  const out = usage?.completion_tokens ?? 0;
  if (out > 1 && after > 0) parts.push(`${count(out)} tokens, ${count((out - 1) / after)} tok/s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`${count(cached ?? 0)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
  return h("p", { class: "meta muted" }, parts.join(" · "),
    id ? [" · ", h("a", { href: `#/requests/${encodeURIComponent(id)}`, text: "explain" })] : null);
}

function settingsPart() {
  const field = (key, title, props = {}, tag = "input") => {
    const input = h(tag, {
      id: `chat-${key}`, ...props,
      on: {
        input: () => {
          settings[key] = input.value.trim();
        },
      },
    });
    input.value = settings[key];
    return h("div", { class: "field" }, h("label", { for: `chat-${key}`, text: title }), input);
  };
  const models = h("select", {
    id: "chat-model",
    on: {
      change: () => {
        settings.model = models.value;
      },
    },
  }, (store.parts.server?.models ?? []).map((name) =>
    h("option", { value: name, selected: name === (settings.model || store.model), text: name })));
  const note = store.parts.server?.key_required && !getKey("tenant")
    ? h("p", { class: "notice", text: "This server has tenants: give an API key." }) : null;
  return h("details", { class: "panel settings", open: window.innerWidth > 1100 },
    h("summary", { text: "Settings" }), note,
    h("div", { class: "field" }, h("label", { for: "chat-model", text: "Model" }), models),
    field("session", "Session", { placeholder: "none", spellcheck: "false" }),
    field("system", "System message", { rows: "3", placeholder: "none" }, "textarea"),
    field("max_tokens", "Most tokens", { type: "number", min: "1" }),
    field("temperature", "Temperature",
      { type: "number", min: "0", max: "2", step: "0.1", placeholder: "the model's" }));
}
