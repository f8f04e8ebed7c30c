// The requests that ended last, and of one of them where its time went and why it went there.

import { getJson } from "./api.js";
import { count, empty, h, icon, seconds } from "./dom.js";
import { explanation } from "./explain.js";
import { poll } from "./poll.js";
import { store } from "./store.js";
import { virtualTable } from "./table.js";

const LIMIT = 200;
const GOOD = ["stop", "length", "tool_calls"];

const number = (key, title, value, text, more = {}) => ({
  key, title, num: true, width: "minmax(50px, 0.6fr)", value, cell: (r) => text(value(r)), ...more,
});
const MODEL = {
  key: "model", title: "Model", width: "minmax(80px, 1fr)", wide: 640, value: (r) => r.model,
  cell: (r) => r.model, same: (r) => r.model,
};
const COLUMNS = [
  {
    key: "at", title: "Request", width: "minmax(104px, 1.4fr)", value: (r) => r.at,
    cell: (r) => h("span", { class: "mono name", text: r.id.slice(0, 12) }), same: (r) => r.id,
  },
  {
    key: "endpoint", title: "Endpoint", width: "minmax(64px, 0.7fr)", wide: 480,
    value: (r) => r.endpoint, cell: (r) => r.endpoint,
  },
  {
    key: "outcome", title: "Outcome", width: "minmax(80px, 1fr)", narrow: "82px",
    value: (r) => r.outcome, same: (r) => r.outcome,
    cell: (r) => h("span", {
      class: `chip ${GOOD.includes(r.outcome) ? "good" : r.outcome === "cancelled" ? "" : "bad"}`,
      text: r.outcome,
    }),
  },
  MODEL,
  number("in", "In", (r) => r.usage.prompt_tokens ?? 0, count, { wide: 480 }),
  number("out", "Out", (r) => r.usage.completion_tokens ?? 0, count, { wide: 480 }),
  number("ttft", "TTFT", (r) => r.ttft_s, seconds, { width: "minmax(64px, 0.7fr)" }),
  number("e2e", "End to end", (r) => r.e2e_s, seconds, { width: "minmax(76px, 0.7fr)" }),
];

export function requests(id) {
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const detail = h("section", { class: "panel detail", "aria-label": "Explanation" });
  const columns = COLUMNS.filter((column) => column !== MODEL || store.hasSeveral);
  const table = virtualTable("Requests", columns, (r) => r.id, (r) => {
    location.hash = `#/requests/${encodeURIComponent(r.id)}`;
  });
  const none = empty("requests", "No requests yet",
    "Requests that have ended at this server are listed here. Send one from the chat.");
  none.hidden = true;
  const find = h("input", {
    type: "search", placeholder: "Request id", "aria-label": "Request id", spellcheck: "false",
  });
  const form = h("form", {
    class: "filters",
    on: {
      submit: (event) => {
        event.preventDefault();
        if (find.value.trim()) location.hash = `#/requests/${encodeURIComponent(find.value.trim())}`;
      },
    },
  }, find, h("button", { class: "button", type: "submit", text: "Explain" }));
  const element = h("div", { class: id ? "fill has-detail" : "fill" },
    h("div", { class: "head" }, h("h1", { text: "Requests" }), h("span", { class: "grow" }), form),
    problem,
    h("div", { class: "split" },
      h("section", { class: "panel grow-panel list" }, table.element, none), detail));

  const known = new Map(); // by id: rows that did not change stay the same objects
  const asking = poll(element, async (signal) => {
    const answer = await getJson("tenant", `requests?limit=${LIMIT}`, { signal });
    const data = answer.data.filter((row) => !store.model || row.model === store.model);
    const rows = data.map((row, at) => {
      const old = known.get(row.id);
      if (old) old.at = at;
      else known.set(row.id, { ...row, at });
      return known.get(row.id);
    });
    for (const key of known.keys()) if (!rows.some((row) => row.id === key)) known.delete(key);
    problem.hidden = true;
    none.hidden = rows.length > 0;
    table.element.hidden = !rows.length;
    table.update(rows);
  }, show);

  function show(error) {
    problem.textContent = error.message;
    problem.hidden = false;
  }

  async function explain() {
    if (!id) {
      detail.replaceChildren(empty("requests", "No request chosen",
        "Choose one to see its phases, and which workers could have served it."));
      return;
    }
    const back = h("a", { class: "back", href: "#/requests" }, icon("back"), "All requests");
    try {
      const path = `requests/${encodeURIComponent(id)}/explanation`;
      detail.replaceChildren(back, explanation(await getJson("tenant", path)));
    } catch (error) {
      detail.replaceChildren(back, h("p", { class: "notice bad inset", text: error.message }));
    }
  }

  return {
    element,
    update() {},
    start() {
      asking.run();
      explain();
    },
    stop: asking.stop,
  };
}
