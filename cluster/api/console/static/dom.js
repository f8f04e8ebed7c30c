// Elements, icons, colours and figures. Nothing here parses HTML: the policy forbids it.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: class, text, style (properties), on (listeners), else attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "style") {
      for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    } else if (name === "on") {
      for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    } else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const ICONS = {
  overview: "M3 12h4l3-8 4 16 3-8h4",
  workers: "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z",
  requests: "M4 6h9M4 12h16M10 18h10",
  batches: "M4 5h16v4H4zM4 10h16v4H4zM4 15h16v4H4z",
  sessions: "M12 3 3 7.5l9 4.5 9-4.5zM3 12l9 4.5 9-4.5M3 16.5 12 21l9-4.5",
  scaling: "M4 20V10M10 20V4M16 20v-7M22 20H2",
  chat: "M4 5h16v11H9l-5 4z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6 19 19"
    + "M5 19l1.4-1.4M17.6 6.4 19 5",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
  keys: "M8 12a4 4 0 1 0 0 8 4 4 0 0 0 0-8M10.8 13.2 20 4M16 8l3 3M13.5 10.5l2 2",
  close: "M6 6l12 12M18 6 6 18",
  back: "M15 5l-7 7 7 7",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const attributes = {
    viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": "1.8",
    "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true",
  };
  for (const [key, value] of Object.entries(attributes)) svg.setAttribute(key, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Change the text only if it is another: layout is not touched for nothing. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const colours = new Map();

/** A colour of the theme, as canvases need it. */
export function colour(name) {
  if (!colours.has(name)) {
    const probe = h("span", { style: { color: `var(--${name})`, display: "none" } });
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

export function forgetColours() {
  colours.clear();
}

const whole = new Intl.NumberFormat("en");

export function count(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  return whole.format(size < 100 && !Number.isInteger(value) ? trim(value) : Math.round(value));
}

function trim(value) {
  return Number(value.toPrecision(3));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${trim(value * 1e6)} µs`;
  if (value < 1) return `${trim(value * 1e3)} ms`;
  if (value < 120) return `${trim(value)} s`;
  if (value < 7200) return `${trim(value / 60)} min`;
  if (value < 172800) return `${trim(value / 3600)} h`;
  return `${trim(value / 86400)} d`;
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
}

export function rate(bytes) {
  if (!bytes) return "–";
  for (const [unit, size] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]]) {
    if (bytes >= size) return `${trim(bytes / size)} ${unit}`;
  }
  return `${Math.round(bytes)} B/s`;
}

export function plural(number, word) {
  return `${whole.format(number)} ${word}${number === 1 ? "" : "s"}`;
}

const STATES = { up: "good", backoff: "warn", silent: "warn", down: "bad" };

export function stateChip(state) {
  return h("span", { class: `chip ${STATES[state] ?? ""}` }, h("i", { "aria-hidden": true }), state);
}

export function roleText(role) {
  return h("span", { class: `role ${role}`, text: role });
}

/** A bar of parts: [[share of the whole, name of a colour, title], ...]. */
export function bar(parts, label, big = false) {
  return h(
    "div",
    { class: big ? "bar thick" : "bar", role: "img", "aria-label": label, title: label },
    parts.map(([share, name]) =>
      h("i", { style: { width: `${100 * Math.min(1, share)}%`, background: `var(--${name})` } })),
  );
}

export function legend(entries) {
  return h(
    "div",
    { class: "legend" },
    entries.map(([name, text, value]) =>
      h(
        "span", {},
        h("i", { style: { background: `var(--${name})` }, "aria-hidden": true }),
        text, value === undefined ? null : h("b", { text: value }),
      )),
  );
}

export function empty(name, title, text) {
  return h("div", { class: "empty" }, icon(name), h("h2", { text: title }), h("p", { text }));
}

export function panel(title, ...body) {
  return h("section", { class: "panel" },
    h("header", {}, h("h2", { text: title })), h("div", { class: "body" }, ...body));
}

export function facts(pairs) {
  return h("dl", { class: "facts" },
    pairs.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", {}, value))));
}

const toasts = document.getElementById("toasts");

/** Within a dialog that is open: what is outside of it can neither be seen nor heard. */
export function toast(text, isBad = false) {
  const note = h("div", { class: isBad ? "toast bad" : "toast", text });
  const host = document.querySelector("dialog[open]") ?? document.body;
  if (toasts.parentElement !== host) host.append(toasts);
  toasts.append(note);
  setTimeout(() => note.remove(), isBad ? 8000 : 4000);
}

export function segments(label, choices, chosen, onChoose) {
  const buttons = choices.map(([value, text]) =>
    h("button", {
      type: "button", "aria-pressed": String(value === chosen), text,
      on: {
        click: (event) => {
          for (const button of buttons) button.setAttribute("aria-pressed", "false");
          event.currentTarget.setAttribute("aria-pressed", "true");
          onChoose(value);
        },
      },
    }));
  return h("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}
