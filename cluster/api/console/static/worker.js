// One worker in a drawer: all its figures, and its role, which can be changed.

import { call } from "./api.js";
import {
  bar, count, facts, h, icon, percent, rate, roleText, seconds, segments, stateChip, toast,
} from "./dom.js";
import { store } from "./store.js";

const ROLES = [["prefill", "Prefill"], ["decode", "Decode"], ["both", "Both"]];

// Facts that have a place of their own above the list of the others.
const DRAWN = new Set([
  "worker", "model", "role", "state", "epoch", "groups", "num_blocks", "num_used_blocks",
  "num_cached_blocks", "num_host_blocks", "num_disk_blocks",
]);
const UNITS = [
  [/_bytes_per_s$/, rate],
  [/_tokens_per_s$/, (value) => `${count(value)} tok/s`],
  [/_rate$/, percent],
  [/_s$/, (value) => seconds(value || null)],
];

let shown = null; // the name of the worker

/** A fact's unit is the end of its name. */
function valueOf(name, value) {
  const [, text] = UNITS.find(([end]) => end.test(name)) ?? [null, count];
  return text(value);
}

export function openWorker(name) {
  const dialog = document.getElementById("drawer");
  if (!store.workers.has(name)) return;
  shown = name;
  const figures = h("div", { class: "figures" });
  dialog.replaceChildren(h("div", { class: "inner" },
    h("div", { class: "title" },
      h("h2", { id: "drawer-title", text: name }),
      h("button", {
        class: "icon-button", type: "button", "aria-label": "Close", on: { click: () => dialog.close() },
      }, icon("close"))),
    figures,
    rolePart(name)));
  dialog.onclose = () => {
    shown = null;
  };
  dialog.onclick = (event) => {
    if (event.target === dialog) dialog.close();
  };
  refreshDrawer();
  dialog.showModal();
}

/** What is open shows the worker as it is now. */
export function refreshDrawer() {
  if (shown === null) return;
  const figures = document.querySelector("#drawer .figures");
  const worker = store.workers.get(shown);
  if (!worker) {
    figures.replaceChildren(h("p", { class: "notice", text: "This worker is gone." }));
    return;
  }
  const blocks = worker.num_blocks || 1;
  const most = Math.max(blocks, worker.num_host_blocks ?? 0, worker.num_disk_blocks ?? 0);
  const line = (name, number, tone, isDevice) => h("div", { class: "tier" },
    h("span", { text: name }),
    h("span", { class: "num" }, h("b", { text: count(number) }), h("span", { class: "muted",
      text: isDevice ? ` of ${count(blocks)} (${percent(number / blocks)})` : " blocks" })),
    bar([[number / most, tone]], `${name}: ${number} blocks`));
  figures.replaceChildren(
    h("div", { class: "chips" }, stateChip(worker.state), roleText(worker.role),
      h("span", { class: "muted", text: `epoch ${worker.epoch ?? "–"}` }),
      worker.model ? h("span", { class: "muted", text: worker.model }) : null),
    h("div", {},
      h("h3", { text: "KV blocks" }),
      line("Device, held by requests", worker.num_used_blocks ?? 0, "device", true),
      line("Device, cached", worker.num_cached_blocks ?? 0, "cached", true),
      line("Host memory", worker.num_host_blocks ?? 0, "host", false),
      line("Disk", worker.num_disk_blocks ?? 0, "disk", false),
      facts((worker.groups ?? []).map((group) => [
        `Device, ${group.kind} (${group.num_groups})`,
        `${count(group.num_used)} used, ${count(group.num_cached)} cached, `
          + `${count(group.num_evicted)} evicted`,
      ]))),
    facts(Object.keys(store.texts).filter((name) => !DRAWN.has(name))
      .map((name) => [store.texts[name].replace(/\.$/, ""), valueOf(name, worker[name])])));
}

function rolePart(name) {
  const now = store.workers.get(name).role;
  let wanted = now;
  const apply = h("button", {
    class: "button primary", type: "button", disabled: true, text: "Set role",
    on: { click: () => setRole(name, wanted, apply) },
  });
  const choice = segments("Role", ROLES, now, (role) => {
    wanted = role;
    apply.disabled = role === store.workers.get(name)?.role;
  });
  return h("div", { class: "role-part" },
    h("h3", { text: "Role" }),
    h("p", { class: "hint", text: "What routers prefer this worker for. Its weights and its KV stay; "
      + "what decodes on a worker that is to prefill moves to others." }),
    h("div", { class: "chips" }, choice, apply));
}

async function setRole(name, role, button) {
  button.disabled = true;
  try {
    const path = `workers/${encodeURIComponent(name)}/role`;
    const answer = await (await call("operator", "POST", path, { body: { role } })).json();
    toast(`${name} was ${answer.was}, and is preferred for ${role} now`);
  } catch (error) {
    button.disabled = false;
    toast(error.message, true);
  }
}
