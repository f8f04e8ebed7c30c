// What the autoscaler did and did not do, and why; whatever it says of itself is shown.

import { count, empty, facts, h, panel } from "./dom.js";
import { store } from "./store.js";

export function scaling() {
  const body = h("div");
  const element = h("div", {}, h("div", { class: "head" }, h("h1", { text: "Scaling" })), body);
  let shown;

  function update() {
    const state = JSON.stringify(store.shown.scaling);
    if (state === shown) return;
    shown = state;
    const all = Object.entries(store.shown.scaling);
    const some = all.filter(([, each]) => each);
    body.replaceChildren(...(some.length ? some : all.slice(0, 1)).flatMap(([model, each]) =>
      [model && each ? h("h2", { text: model }) : null, ...parts(each)].filter(Boolean)));
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
  const entries = Object.entries(state);
  const plain = entries.filter(([, value]) => !isTable(value) && !isEmptyList(value));
  if (plain.length) {
    made.push(panel("Now", facts(plain.map(([name, value]) => [words(name), shownValue(value)]))));
  }
  for (const [name, value] of entries.filter(([, each]) => isTable(each))) {
    const isLog = value.every((each) => "reason" in each);
    made.push(panel(words(name), isLog ? log(value) : rows(name, value)));
  }
  return [h("div", { class: "stack" }, made)];
}

function isEmptyList(value) {
  return Array.isArray(value) && !value.length;
}

/** Decisions, the newest first: what was done or not, why, and folded what it was made from. */
function log(decisions) {
  return h("ol", { class: "decisions" }, decisions.toReversed().map((each) => {
    const { at_s: at, reason, text, inputs, alternatives, ...rest } = each;
    const acts = Object.entries(rest).filter(([, value]) => Array.isArray(value) && value.length);
    const plain = Object.entries(rest).filter(([, value]) => !Array.isArray(value));
    const made = Object.entries(inputs ?? {});
    const folded = [
      made.length ? facts(made.map(([name, value]) => [words(name), shownValue(value)])) : null,
      isTable(alternatives) ? rows("Alternatives", alternatives) : null,
    ].filter(Boolean);
    return h("li", {},
      h("div", { class: "chips" },
        h("span", { class: acts.length ? "chip accent" : "chip", text: words(String(reason)) }),
        acts.map(([name, value]) => h("b", { text: `${words(name)}: ${shownValue(value)}` })),
        h("span", { class: "grow" }),
        plain.map(([name, value]) =>
          h("span", { class: "muted", text: `${words(name)} ${shownValue(value)}` })),
        h("time", { class: "muted", text: clock(at) })),
      text ? h("p", { text }) : null,
      folded.length ? h("details", {}, h("summary", { text: "Made from" }), folded) : null);
  }));
}

/** A time since 1970, or of a clock of the server's own. */
function clock(at) {
  if (typeof at !== "number") return at === undefined ? "" : String(at);
  return at > 1e9 ? new Date(at * 1000).toLocaleTimeString() : `at ${Math.round(at)} s`;
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
  if (typeof value === "number") {
    return Number.isInteger(value) || value >= 100 ? count(value) : String(Number(value.toPrecision(3)));
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.length ? value.map(shownValue).join(", ") : "none";
  return Object.entries(value).map(([k, v]) => `${words(k)} ${shownValue(v)}`).join(", ") || "none";
}

function words(name) {
  const text = name.replace(/_s$/, " (s)").replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
