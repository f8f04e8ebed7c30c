// All workers in a table that can be searched, filtered and sorted.

import { bar, count, h, percent, plural, roleText, seconds, setText, stateChip } from "./dom.js";
import { store } from "./store.js";
import { virtualTable } from "./table.js";
import { openWorker } from "./worker.js";

const use = (worker) => worker.num_used_blocks / (worker.num_blocks || 1);
const number = (key, title, more = {}) => ({
  key, title, num: true, width: "minmax(64px, 0.6fr)", wide: true,
  value: (worker) => worker[key] ?? 0, cell: (worker) => count(worker[key]), ...more,
});

const COLUMNS = [
  {
    key: "worker", title: "Worker", width: "minmax(130px, 1.5fr)", value: (w) => w.worker,
    cell: (w) => h("span", { class: "name", text: w.worker }),
  },
  {
    key: "state", title: "State", width: "minmax(86px, 0.7fr)", narrow: "86px",
    value: (w) => w.state, cell: (w) => stateChip(w.state),
  },
  {
    key: "role", title: "Role", width: "minmax(70px, 0.6fr)", wide: true, value: (w) => w.role,
    cell: (w) => roleText(w.role),
  },
  number("epoch", "Epoch"),
  {
    key: "kv", title: "KV held", width: "minmax(140px, 1.5fr)", narrow: "minmax(88px, 1fr)",
    value: use,
    cell: (w) => h("div", { class: "meter" },
      bar([[use(w), w.role]], `${percent(use(w))} of ${w.num_blocks} blocks`),
      h("span", { text: percent(use(w)) })),
  },
  number("num_cached_blocks", "Cached"),
  number("num_host_blocks", "Host"),
  number("num_disk_blocks", "Disk"),
  number("num_running", "Running"),
  number("num_waiting", "Waiting"),
  number("prefill_tokens_per_s", "Prefill tok/s", { width: "minmax(96px, 0.8fr)" }),
  number("decode_step_s", "Step", { cell: (w) => seconds(w.decode_step_s || null) }),
  number("cache_hit_rate", "Hit rate", { cell: (w) => percent(w.cache_hit_rate) }),
];

let text = "";
let role = "";
let state = "";

export function workers() {
  const found = h("span", { class: "muted", role: "status" });
  const table = virtualTable("Workers", COLUMNS, (w) => w.worker, (w) => openWorker(w.worker));
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
    const all = [...store.workers.values()];
    const shown = all.filter((w) => (!role || w.role === role) && (!state || w.state === state)
      && (!text || w.worker.toLowerCase().includes(text)));
    setText(found, shown.length === all.length ? plural(all.length, "worker")
      : `${shown.length} of ${plural(all.length, "worker")}`);
    table.update(shown);
  }

  return { element, update };
}
