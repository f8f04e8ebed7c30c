// All workers in a table that can be searched, filtered and sorted.

import { bar, count, h, percent, plural, roleText, seconds, setText, stateChip } from "./dom.js";
import { store } from "./store.js";
import { virtualTable } from "./table.js";
import { openWorker } from "./worker.js";

const use = (worker) => worker.num_used_blocks / (worker.num_blocks || 1);
const number = (key, title, wide, more = {}) => ({
  key, title, wide, num: true, width: "minmax(58px, 0.6fr)",
  value: (worker) => worker[key] ?? 0, cell: (worker) => count(worker[key]), ...more,
});

const MODEL = {
  key: "model", title: "Model", width: "minmax(80px, 1fr)", wide: 640, value: (w) => w.model,
  cell: (w) => w.model, same: (w) => w.model,
};
const COLUMNS = [
  {
    key: "worker", title: "Worker", width: "minmax(130px, 1.5fr)", value: (w) => w.worker,
    cell: (w) => h("span", { class: "name", text: w.worker }), same: (w) => w.worker,
  },
  {
    key: "state", title: "State", width: "minmax(86px, 0.7fr)", narrow: "86px",
    value: (w) => w.state, cell: (w) => stateChip(w.state), same: (w) => w.state,
  },
  {
    key: "role", title: "Role", width: "minmax(62px, 0.6fr)", wide: 480, value: (w) => w.role,
    cell: (w) => roleText(w.role), same: (w) => w.role,
  },
  MODEL,
  number("epoch", "Epoch", 1120),
  {
    key: "kv", title: "KV held", high: true, width: "minmax(140px, 1.5fr)",
    narrow: "minmax(100px, 1fr)", value: use, same: (w) => `${percent(use(w))} ${w.role}`,
    cell: (w) => h("div", { class: "meter" },
      bar([[use(w), w.role]], `${percent(use(w))} of ${w.num_blocks} blocks`),
      h("span", { text: percent(use(w)) })),
  },
  number("num_cached_blocks", "Cached", 860),
  number("num_host_blocks", "Host", 1000),
  number("num_disk_blocks", "Disk", 1000),
  number("num_running", "Running", 560),
  number("num_waiting", "Waiting", 560),
  number("prefill_tokens_per_s", "Prefill tok/s", 900, { width: "minmax(88px, 0.8fr)" }),
  number("decode_step_s", "Step", 720, { cell: (w) => seconds(w.decode_step_s || null) }),
  number("cache_hit_rate", "Hit rate", 720, { cell: (w) => percent(w.cache_hit_rate) }),
];

let text = "";
let role = "";
let state = "";

export function workers() {
  const found = h("span", { class: "muted", role: "status" });
  const columns = COLUMNS.filter((column) => column !== MODEL || store.hasSeveral);
  const table = virtualTable("Workers", columns, (w) => w.worker, (w) => openWorker(w.worker));
  const search = h("input", {
    type: "search", placeholder: "Find a worker", "aria-label": "Find a worker", value: text,
    on: {
      input: () => {
        text = search.value.trim().toLowerCase();
        update();
      },
    },
  });
  const select = (label, choices, chosen, set) => h("select", {
    "aria-label": label,
    on: {
      change: (event) => {
        set(event.currentTarget.value);
        update();
      },
    },
  }, choices.map((value) => h("option", {
    value, selected: value === chosen, text: value || label,
  })));
  const roles = select("All roles", ["", "prefill", "decode", "both"], role, (next) => {
    role = next;
  });
  const states = select("All states", ["", "up", "backoff", "down"], state, (next) => {
    state = next;
  });
  const element = h("div", { class: "fill" },
    h("div", { class: "head" }, h("h1", { text: "Workers" }), found, h("span", { class: "grow" }),
      h("div", { class: "filters" }, search, roles, states)),
    h("section", { class: "panel grow-panel" }, table.element));

  function update() {
    const all = store.shown.workers;
    const shown = all.filter((w) => (!role || w.role === role) && (!state || w.state === state)
      && (!text || w.worker.toLowerCase().includes(text)));
    setText(found, shown.length === all.length ? plural(all.length, "worker")
      : `${shown.length} of ${plural(all.length, "worker")}`);
    table.update(shown);
  }

  return { element, update };
}
