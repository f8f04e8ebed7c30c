// Lines over time, on canvases.

import { colour, h, legend, seconds } from "./dom.js";

const PAD = { left: 52, right: 10, top: 8, bottom: 22 };

/** A canvas that is as sharp as the screen, and knows when its size changes. */
function canvas(className, redraw) {
  const element = h("canvas", { class: className, role: "img" });
  let width = 0;
  new ResizeObserver(() => {
    if (element.clientWidth !== width) {
      width = element.clientWidth;
      redraw();
    }
  }).observe(element);
  return element;
}

function begin(element) {
  const scale = window.devicePixelRatio || 1;
  const width = element.clientWidth;
  const height = element.clientHeight;
  if (!width || !height) return null;
  if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
    element.width = Math.round(width * scale);
    element.height = Math.round(height * scale);
  }
  const pen = element.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/** The next round number: an axis ends there. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].find((step) => step * unit >= value * 0.999) * unit;
}

/**
 * A panel with lines. `series`: [[key of a point, name, colour], ...]; `format`: of a value.
 * Returns the panel, and `update(points, span)`, span in seconds.
 */
export function lineChart(title, about, series, format, range = null) {
  let points = [];
  let span = 300;
  let pointer = null; // x within the canvas
  let keys = h("div");
  const tip = h("div", { class: "tip", hidden: true });
  const element = canvas("lines", () => draw());
  const box = h("div", { class: "chart" }, element, tip);
  element.addEventListener("pointermove", (event) => {
    pointer = event.offsetX;
    draw();
  });
  element.addEventListener("pointerleave", () => {
    pointer = null;
    draw();
  });
  const none = h("p", { class: "none", hidden: true, text: "No requests in this time" });
  const panel = h("section", { class: "panel" },
    h("header", {}, h("h2", { text: title }), h("span", { class: "sub", text: about }),
      h("span", { class: "grow" }), range),
    h("div", { class: "body" }, keys, box, none));
  box.append(none);

  function draw() {
    const started = begin(element);
    if (!started) return;
    const { pen, width, height } = started;
    const shown = points;
    const end = points.length ? points.at(-1).at : 0;
    const most = Math.max(0, ...shown.flatMap((p) => series.map(([key]) => p[key] ?? 0)));
    const top = roundUp(most * 1.05);
    const inner = { w: width - PAD.left - PAD.right, h: height - PAD.top - PAD.bottom };
    const x = (at) => PAD.left + inner.w * (1 - (end - at) / span);
    const y = (value) => PAD.top + inner.h * (1 - value / top);
    none.hidden = most > 0;
    drawAxes(pen, { width, height, inner, top, span, format, isEmpty: !(most > 0) });
    for (const [key, , name] of series) drawLine(pen, shown, key, x, y, colour(name));
    drawPointer(pen, shown, x, y, height);
  }

  function drawPointer(pen, shown, x, y, height) {
    tip.hidden = pointer === null || !shown.length;
    if (tip.hidden) return;
    const point = shown.reduce((best, p) =>
      (Math.abs(x(p.at) - pointer) < Math.abs(x(best.at) - pointer) ? p : best));
    const at = x(point.at);
    pen.strokeStyle = colour("line-strong");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(at, PAD.top);
    pen.lineTo(at, height - PAD.bottom);
    pen.stroke();
    for (const [key, , name] of series) {
      if (point[key] === null) continue;
      pen.fillStyle = colour(name);
      pen.beginPath();
      pen.arc(at, y(point[key]), 3.5, 0, 7);
      pen.fill();
    }
    tip.replaceChildren(
      h("b", { text: new Date(point.at * 1000).toLocaleTimeString() }),
      ...series.map(([key, text, name]) => h("span", {},
        h("i", { style: { background: `var(--${name})` } }), text,
        h("b", { text: format(point[key]) }))));
    tip.style.setProperty("left", `${Math.min(at + 12, element.clientWidth - tip.offsetWidth)}px`);
  }

  return {
    panel,
    draw,
    update(all, seconds_) {
      span = seconds_;
      const from = all.length ? all.at(-1).at - span : 0;
      points = all.filter((point) => point.at >= from);
      const last = points.at(-1) ?? {};
      const texts = series.map(([key, text, name]) => [name, text, format(last[key])]);
      const fresh = legend(texts);
      keys.replaceWith(fresh);
      keys = fresh;
      const says = texts.map(([, text, value]) => `${text} ${value}`).join(", ");
      element.setAttribute("aria-label", `${title} of the last ${seconds(span)}; now ${says}`);
      draw();
    },
  };
}

function drawAxes(pen, { width, height, inner, top, span, format, isEmpty }) {
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  pen.lineWidth = 1;
  for (let step = 0; step <= 4; step++) {
    const at = Math.round(PAD.top + (inner.h * step) / 4) + 0.5;
    pen.strokeStyle = colour(step === 4 ? "line-strong" : "line");
    pen.beginPath();
    pen.moveTo(PAD.left, at);
    pen.lineTo(width - PAD.right, at);
    pen.stroke();
    if (isEmpty) continue;
    pen.fillStyle = colour("muted");
    pen.textAlign = "right";
    pen.fillText(format((top * (4 - step)) / 4), PAD.left - 8, at);
  }
  pen.fillStyle = colour("muted");
  const ticks = inner.w > 360 ? 4 : 2;
  for (let step = 0; step <= ticks; step++) {
    const ago = span * (1 - step / ticks);
    pen.textAlign = step === 0 ? "left" : step === ticks ? "right" : "center";
    const text = ago === 0 ? "now" : `−${seconds(ago)}`;
    pen.fillText(text, PAD.left + (inner.w * step) / ticks, height - 9);
  }
}

function drawLine(pen, points, key, x, y, stroke) {
  pen.strokeStyle = stroke;
  pen.lineWidth = 1.75;
  pen.lineJoin = "round";
  pen.beginPath();
  let isDown = false;
  let before = null;
  for (const point of points) {
    const value = point[key];
    // A gap, in the values or in time, is a gap in the line.
    if (value === null || value === undefined) {
      isDown = false;
      continue;
    }
    if (isDown && point.at - before < 5) pen.lineTo(x(point.at), y(value));
    else pen.moveTo(x(point.at), y(value));
    isDown = true;
    before = point.at;
  }
  pen.stroke();
}

/** A small line without axes. */
export function spark(name) {
  let values = [];
  const element = canvas("spark", () => draw());
  element.setAttribute("aria-hidden", "true");
  element.removeAttribute("role");

  function draw() {
    const started = begin(element);
    if (!started || values.length < 2) return;
    const { pen, width, height } = started;
    const top = Math.max(...values.map((value) => value ?? 0)) || 1;
    const x = (i) => (width * i) / (values.length - 1);
    const y = (value) => height - 2 - (height - 4) * ((value ?? 0) / top);
    pen.beginPath();
    values.forEach((value, i) => pen.lineTo(x(i), y(value)));
    pen.strokeStyle = colour(name);
    pen.lineWidth = 1.5;
    pen.stroke();
    pen.lineTo(width, height);
    pen.lineTo(0, height);
    pen.globalAlpha = 0.12;
    pen.fillStyle = colour(name);
    pen.fill();
    pen.globalAlpha = 1;
  }

  return {
    element,
    draw,
    update(next) {
      values = next;
      draw();
    },
  };
}

export { begin, canvas };
