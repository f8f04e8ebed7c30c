// Sessions with the tiers of their KV, and what can be done with them.

import { call, getJson } from "./api.js";
import { bar, count, empty, h, legend, plural, seconds, setText, toast } from "./dom.js";
import { poll } from "./poll.js";
import { store } from "./store.js";

const PAGE = 50;
const TIERS = ["device", "host", "disk"];
const TONES = { active: "good", idle: "", parked: "accent" };

export function sessions() {
  const pages = [""]; // the name that each page begins after
  let shown = "";
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const body = h("tbody");
  const found = h("span", { class: "muted", role: "status" });
  const heads = ["Session", "State", "KV by tier", "Tokens", "Turns", "Idle for", "Kept for", ""];
  const table = h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Sessions" },
    h("table", { class: "sessions" },
      h("thead", {}, h("tr", {}, heads.map((text, i) => (text
        ? h("th", { scope: "col", class: i > 2 ? "num" : "", text })
        : h("td", { class: "head" }, h("span", { class: "hidden-text", text: "Actions" })))))),
      body));
  const none = empty("sessions", "No sessions",
    "A request with a prompt_cache_key makes one: the chat does, when you give it a session's name.");
  const previous = h("button", { class: "button small", type: "button", text: "Previous" });
  const next = h("button", { class: "button small", type: "button", text: "Next" });
  const element = h("div", {},
    h("div", { class: "head" }, h("h1", { text: "Sessions" }), found, h("span", { class: "grow" }),
      legend([["device", "device"], ["host", "host memory"], ["disk", "disk"]])),
    problem,
    h("section", { class: "panel" }, table, none),
    h("div", { class: "pager" }, previous, next));
  let last = "";
  let more = false;
  previous.addEventListener("click", () => {
    pages.pop();
    asking.run();
  });
  next.addEventListener("click", () => {
    pages.push(last);
    asking.run();
  });

  const asking = poll(element, async (signal) => {
    const path = `v1/sessions?limit=${PAGE}&after=${encodeURIComponent(pages.at(-1))}`
      + store.query("&");
    const answer = await getJson("tenant", path, { signal });
    last = answer.data.at(-1)?.id ?? "";
    more = answer.has_more;
    problem.hidden = true;
    draw(answer.data);
  }, (error) => {
    problem.textContent = error.message;
    problem.hidden = false;
  });

  /** Rows are made anew only if something in them changed: what has the focus keeps it. */
  function draw(data) {
    table.hidden = !data.length;
    none.hidden = data.length > 0;
    const whose = store.hasSeveral ? ` of ${store.model || store.parts.models[0].model}` : "";
    setText(found, (data.length ? `${plural(data.length, "session")}${more ? ", and more" : ""}` : "")
      + whose);
    previous.hidden = pages.length < 2;
    next.hidden = !more;
    const state = JSON.stringify(data.map((each) => ({
      ...each, age_s: 0, last_used_s: seconds(Math.floor(each.last_used_s)),
    })));
    if (state === shown) return;
    shown = state;
    const focus = document.activeElement?.dataset?.what;
    body.replaceChildren(...data.map((each) => row(each, act)));
    if (focus) body.querySelector(`[data-what=${CSS.escape(focus)}]`)?.focus();
  }

  async function act(session, op, button) {
    button.disabled = true;
    try {
      const path = `v1/sessions/${encodeURIComponent(session.id)}/${op}${store.query("?")}`;
      const answer = await (await call("tenant", "POST", path)).json();
      const done = Object.entries(answer.blocks_done ?? {});
      const where = done.map(([worker, blocks]) => `${plural(blocks, "block")} on ${worker}`);
      toast(`${session.id} is ${answer.state}${where.length ? `: ${where.join(", ")}` : ""}`);
      shown = "";
    } catch (error) {
      toast(error.message, true);
    }
    button.disabled = false;
    asking.run();
  }

  return { element, update() {}, start: asking.run, stop: asking.stop };
}

function row(session, act) {
  const blocks = session.num_blocks || 1;
  const text = TIERS.map((tier) => `${session.blocks[tier]} ${tier}`).join(", ");
  const left = Math.max(0, session.retention_s - session.last_used_s);
  const button = (op, title) => h("button", {
    class: "button small", type: "button", text: title, "aria-label": `${title} ${session.id}`,
    "data-what": `${op} ${session.id}`, on: { click: (event) => act(session, op, event.currentTarget) },
  });
  const is = (state) => session.state === state;
  return h("tr", {},
    h("td", {}, h("b", { class: "wrap", text: session.id }),
      h("span", { class: "muted below", text: session.last_worker ?? "" })),
    h("td", {}, h("span", { class: `chip ${TONES[session.state] ?? ""}`, text: session.state }),
      session.pinned ? h("span", { class: "chip warn", text: "pinned" }) : null),
    h("td", { class: "tiers" },
      TIERS.map((tier) => bar([[session.blocks[tier] / blocks, tier]],
        `${session.blocks[tier]} of ${session.num_blocks} blocks: ${tier}`)),
      h("span", { class: "muted below", text })),
    h("td", { class: "num", text: count(session.num_tokens) }),
    h("td", { class: "num", text: count(session.num_turns) }),
    h("td", { class: "num", text: seconds(Math.floor(session.last_used_s)) }),
    h("td", { class: "num", text: session.pinned ? "pinned" : seconds(Math.floor(left)) }),
    h("td", { class: "buttons" },
      is("parked") ? null : button("park", "Park"),
      is("parked") || session.blocks.device < session.num_blocks ? button("resume", "Resume") : null,
      session.pinned ? button("unpin", "Unpin") : button("pin", "Pin")));
}
