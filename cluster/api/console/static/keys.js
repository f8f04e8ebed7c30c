// Keys that operators have made, what was used with each, and their end.

import { call, getJson } from "./api.js";
import { count, empty, h, seconds, setText, toast } from "./dom.js";
import { poll } from "./poll.js";

const PATH = "v1/organization/admin_api_keys";
const USAGE = "v1/organization/usage/completions";
const MOST = 100;
const DAYS = 30;
const TONES = { active: "good", expired: "warn", revoked: "bad" };
const LIMITS = {
  requests_per_minute: "requests/min", tokens_per_minute: "tokens/min", tokens_per_day: "tokens/day",
};

export function keys() {
  let shown = "";
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const body = h("tbody");
  const found = h("span", { class: "muted", role: "status" });
  const heads = ["Key", "State", "Scopes", "Limits", `Requests, ${DAYS} days`, "Tokens", "Used", "Ends", ""];
  const table = h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Keys" },
    h("table", { class: "sessions" },
      h("thead", {}, h("tr", {}, heads.map((text, i) => (text
        ? h("th", { scope: "col", class: i > 3 ? "num" : "", text })
        : h("td", { class: "head" }, h("span", { class: "hidden-text", text: "Actions" })))))),
      body));
  const none = empty("keys", "No keys", "kvrelay keys create makes one, and shows it once.");
  const element = h("div", {},
    h("div", { class: "head" }, h("h1", { text: "Keys" }), found), problem,
    h("section", { class: "panel" }, table, none));

  const asking = poll(element, async (signal) => {
    const since = Math.floor(Date.now() / 1000) - DAYS * 86400;
    const [answer, usage] = await Promise.all([
      getJson("operator", `${PATH}?limit=${MOST}`, { signal }),
      getJson("operator", `${USAGE}?start_time=${since}&limit=${DAYS + 1}&group_by=api_key_id`, { signal }),
    ]);
    problem.hidden = true;
    draw(answer.data, answer.has_more, sums(usage.data));
  }, (error) => {
    problem.textContent = error.message;
    problem.hidden = false;
  });

  /** Rows are made anew only if something in them changed: what has the focus keeps it. */
  function draw(data, more, used) {
    table.hidden = !data.length;
    none.hidden = data.length > 0;
    setText(found, data.length ? `${count(data.length)} made${more ? ", and more" : ""}` : "");
    const state = JSON.stringify([data, used, data.map((each) => ago(each.last_used_at))]);
    if (state === shown) return;
    shown = state;
    const focus = document.activeElement?.dataset?.what;
    body.replaceChildren(...data.map((each) => row(each, used[each.id], revoke)));
    if (focus) body.querySelector(`[data-what=${CSS.escape(focus)}]`)?.focus();
  }

  /** The first click asks, the second one does it. */
  async function revoke(key, button) {
    if (!button.dataset.asked) {
      button.dataset.asked = "yes";
      button.textContent = "Revoke for ever?";
      return;
    }
    button.disabled = true;
    try {
      await call("operator", "DELETE", `${PATH}/${encodeURIComponent(key.id)}`);
      toast(`${key.name} is revoked, at all routers within 2 s`);
    } catch (error) {
      toast(error.message, true);
    }
    shown = "";
    asking.run();
  }

  return { element, update() {}, start: asking.run, stop: asking.stop };
}

/** Requests and tokens by key, of all days. */
function sums(buckets) {
  const found = {};
  for (const each of buckets.flatMap((bucket) => bucket.results)) {
    const [requests, tokens] = found[each.api_key_id] ?? [0, 0];
    found[each.api_key_id] = [
      requests + each.num_model_requests, tokens + each.input_tokens + each.output_tokens,
    ];
  }
  return found;
}

/** By the minute, so that a row does not change with each look. */
function ago(at) {
  const minutes = Math.max(0, Math.floor((Date.now() / 1000 - at) / 60));
  if (at === null) return "never";
  return minutes ? `${seconds(60 * minutes)} ago` : "now";
}

function row(key, [requests, tokens] = [0, 0], revoke) {
  const limits = Object.entries(LIMITS).filter(([name]) => key[name]);
  const end = key.revoked_at ?? key.expires_at;
  return h("tr", {},
    h("td", {}, h("b", { class: "wrap", text: key.name }),
      h("span", { class: "muted below", text: `${key.id} · ${key.redacted_value}` })),
    h("td", {}, h("span", { class: `chip ${TONES[key.state] ?? ""}`, text: key.state })),
    h("td", { text: key.scopes.join(", ") },
      key.tenant ? h("span", { class: "muted below", text: key.tenant }) : null),
    h("td", {}, limits.map(([name, text]) => h("span", {
      class: "muted below", text: `${count(key[name])} ${text}`,
    }))),
    h("td", { class: "num", text: count(requests) }),
    h("td", { class: "num", text: count(tokens) }),
    h("td", { class: "num", text: ago(key.last_used_at) }),
    h("td", { class: "num", text: end === null ? "never" : new Date(1000 * end).toLocaleDateString() }),
    h("td", { class: "buttons" }, key.state === "active" ? h("button", {
      class: "button small", type: "button", text: "Revoke", "aria-label": `Revoke ${key.name}`,
      "data-what": `revoke ${key.id}`, on: { click: (event) => revoke(key, event.currentTarget) },
    }) : null));
}
