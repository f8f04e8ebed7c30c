// What the autoscaler did and did not do, and why; whatever it says of itself is shown.

import { count, empty, facts, h, panel } from "./dom.js";
import { store } from "./store.js";

export function scaling() {
  const body = h("div");
  const element = h("div", {}, h("div", { class: "head" }, h("h1", { text: "Scaling" })), body);
  let shown;

  function update() {
    const state = JSON.stringify(store.parts.scaling ?? null);
    if (state === shown) return;
    shown = state;
    body.replaceChildren(...parts(store.parts.scaling));
  }
  return { element, update };
}

function parts(state) {
  if (!state || typeof state !== "object") {
    return [h("section", { class: "panel" }, empty("scaling", "No autoscaler runs here",
      "When one does, its decisions are listed here: what it did or did not do, from which inputs, "
      + "and why. Until then workers are as many as were started, and roles are set by hand."))];
  }
  const made = [];
  const plain = Object.entries(state).filter(([, value]) => !isTable(value));
  if (plain.length) {
    made.push(panel("Now", facts(plain.map(([name, value]) => [words(name), shownValue(value)]))));
  }
  for (const [name, value] of Object.entries(state)) {
    if (isTable(value)) made.push(panel(words(name), rows(name, value)));
  }
  return [h("div", { class: "stack" }, made)];
}

function isTable(value) {
  return Array.isArray(value) && value.length > 0 && value.every((each) =>
    each !== null && typeof each === "object" && !Array.isArray(each));
}

function rows(name, list) {
  const keys = [...new Set(list.flatMap(Object.keys))];
  return h("div", { class: "scroll-x flush", tabindex: "0", role: "region", "aria-label": words(name) },
    h("table", {},
      h("thead", {}, h("tr", {}, keys.map((key) => h("th", { scope: "col", text: words(key) })))),
      h("tbody", {}, list.map((each) => h("tr", {}, keys.map((key) =>
        h("td", {}, shownValue(each[key]))))))));
}

function shownValue(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "number") return count(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.length ? value.map(shownValue).join(", ") : "none";
  return Object.entries(value).map(([k, v]) => `${words(k)} ${shownValue(v)}`).join(", ") || "none";
}

function words(name) {
  const text = name.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
