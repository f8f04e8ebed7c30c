// The page: its views by the address, its link to the server, keys and theme.

import { beginSession, getKey, setKey } from "./api.js";
import { batches } from "./batches.js";
import { chat } from "./chat.js";
import { empty, forgetColours, h, icon, setText } from "./dom.js";
import { keys } from "./keys.js";
import { overview } from "./overview.js";
import { requests } from "./requests.js";
import { scaling } from "./scaling.js";
import { sessions } from "./sessions.js";
import { store } from "./store.js";
import { refreshDrawer } from "./worker.js";
import { workers } from "./workers.js";

// `live`: it shows what the operators' events tell; the others ask for themselves.
const VIEWS = {
  overview: { title: "Overview", make: overview, live: true },
  workers: { title: "Workers", make: workers, live: true },
  requests: { title: "Requests", make: requests },
  sessions: { title: "Sessions", make: sessions },
  batches: { title: "Batches", make: batches },
  keys: { title: "Keys", make: keys },
  scaling: { title: "Scaling", make: scaling, live: true },
  chat: { title: "Chat", make: chat },
};
const LINKS = { connecting: "Connecting", live: "Live", stale: "Reconnecting", locked: "No access" };
const THEMES = ["", "light", "dark"];

const at = (id) => document.getElementById(id);
let view = null; // what is shown, of VIEWS' make
let name = "";

function route() {
  at("drawer").close();
  const [, wanted = "", argument = ""] = location.hash.split("/");
  name = wanted in VIEWS ? wanted : "overview";
  document.title = `${VIEWS[name].title} · KVRelay console`;
  for (const link of at("nav").querySelectorAll("a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  show(argument ? decodeURIComponent(argument) : "");
}

function show(argument = "") {
  view?.stop?.();
  view = null;
  const { make, live, title } = VIEWS[name];
  if (live && !store.hasData) {
    at("main").replaceChildren(h("div", {}, h("div", { class: "head" }, h("h1", { text: title })),
      h("section", { class: "panel" }, waiting())));
    return;
  }
  view = make(argument);
  at("main").replaceChildren(view.element);
  view.update();
  view.start?.();
}

function waiting() {
  if (store.link === "locked") {
    const note = empty("keys", "Operators only", store.problem);
    note.append(h("p", { class: "actions-center" }, h("button", {
      class: "button primary", type: "button", text: "Give a key", on: { click: () => openKeys() },
    })));
    return note;
  }
  return empty("overview", store.link === "stale" ? "No connection" : "Connecting", store.problem);
}

let isAsked = false;

/** At most one drawing for each frame. */
function onChange() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    if (!view && VIEWS[name].live) show();
    else if (VIEWS[name].live) view.update();
    refreshDrawer();
    setText(at("model"), store.parts.model ?? "");
    at("model").hidden = !store.parts.model || store.hasSeveral;
    offerModels();
    setText(at("version"), `${store.parts.router.router ?? "KVRelay"} · ${store.parts.server.version}`);
    setText(at("nav").querySelector("[data-view=workers] .count"),
      String(store.shown.workers.length));
  });
}

function offerModels() {
  const select = at("models");
  const names = store.parts.models.map((each) => each.model);
  if (select.dataset.names !== names.join("\n")) {
    select.dataset.names = names.join("\n");
    select.replaceChildren(...["", ...names].map((name) =>
      h("option", { value: name, text: name || `All ${names.length} models` })));
  }
  select.value = store.model;
  select.hidden = !store.hasSeveral;
}

function onLink() {
  const state = at("link-state");
  state.dataset.state = store.link;
  state.title = store.problem;
  setText(state.querySelector("span"), LINKS[store.link]);
  if (!view && VIEWS[name].live) show();
  if (store.link === "locked" && (getKey("operator") || VIEWS[name].live)) openKeys(store.problem);
}

function openKeys(problem = "") {
  const dialog = at("key-dialog");
  setText(at("key-problem"), problem);
  at("key-problem").hidden = !problem;
  at("operator-key").value = getKey("operator");
  at("api-key").value = getKey("tenant");
  if (!dialog.open) dialog.showModal();
}

function setUpKeys() {
  const dialog = at("key-dialog");
  at("keys").append(icon("keys"));
  at("keys").addEventListener("click", () => openKeys());
  at("key-cancel").addEventListener("click", () => dialog.close());
  at("key-form").addEventListener("submit", () => {
    setKey("operator", at("operator-key").value.trim());
    setKey("tenant", at("api-key").value.trim());
    store.tell("connecting", "");
    store.listen();
    if (!VIEWS[name].live) route();
  });
}

function setUpTheme() {
  const root = document.documentElement;
  const button = at("theme");
  const draw = () => {
    const theme = root.dataset.theme ?? "";
    const about = `Theme: ${theme || "as the system"}`;
    button.setAttribute("aria-label", about);
    button.title = about;
    button.replaceChildren(icon({ light: "sun", dark: "moon" }[theme] ?? "system"));
    forgetColours();
    view?.redraw?.();
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    try {
      localStorage.setItem("kvrelay-theme", next);
    } catch {
      // Then it is forgotten with the page.
    }
    draw();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

function setUpNav() {
  at("nav").replaceChildren(
    ...Object.entries(VIEWS).map(([key, { title }]) =>
      h("a", { href: `#/${key}`, "data-view": key }, icon(key), h("span", { text: title }),
        h("span", { class: "count", "aria-hidden": true }))),
    h("span", { class: "foot", id: "version" }));
  window.addEventListener("hashchange", route);
}

setUpNav();
setUpTheme();
setUpKeys();
at("models").addEventListener("change", () => {
  store.model = at("models").value;
  route();
  onChange();
});
store.addEventListener("change", onChange);
store.addEventListener("link", onLink);

const [, ticket] = location.hash.split("#ticket=");
if (ticket) {
  history.replaceState(null, "", location.pathname);
  try {
    await beginSession(ticket);
  } catch (error) {
    openKeys(error.message);
  }
}
route();
store.listen();
