// All workers as cells of a canvas, a row of pools: the whole fleet at a glance.

import { begin, canvas } from "./charts.js";
import { colour, count, h, percent, plural } from "./dom.js";

const LABEL = 18;

export const MEASURES = {
  kv: ["KV use", (w) => w.num_used_blocks / (w.num_blocks || 1), percent],
  cached: ["Cached", (w) => w.num_cached_blocks / (w.num_blocks || 1), percent],
  running: ["Running", (w) => w.num_running, count],
  waiting: ["Waiting", (w) => w.num_waiting, count],
};

export function fleetMap(onOpen) {
  let workers = [];
  let measure = "kv";
  let cells = []; // {x, y, worker}
  let size = 0;
  let height = 0;
  const tip = h("div", { class: "tip", hidden: true });
  const element = canvas("fleet", () => draw());
  const box = h("div", { class: "chart" }, element, tip);

  function at(event) {
    const inside = (from, to) => to >= from && to < from + size;
    return cells.find((c) => inside(c.x, event.offsetX) && inside(c.y, event.offsetY))?.worker;
  }
  element.addEventListener("pointermove", (event) => {
    const worker = at(event);
    tip.hidden = !worker;
    element.style.setProperty("cursor", worker ? "pointer" : "default");
    if (!worker) return;
    const [name, value, format] = MEASURES[measure];
    tip.replaceChildren(h("b", { text: worker.worker }),
      h("span", {}, `${worker.role}, ${worker.state}`),
      h("span", {}, `${name} `, h("b", { text: format(value(worker)) })));
    const left = Math.min(event.offsetX + 14, element.clientWidth - tip.offsetWidth);
    tip.style.setProperty("left", `${Math.max(0, left)}px`);
    tip.style.setProperty("top", `${event.offsetY + 16}px`);
  });
  element.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  element.addEventListener("click", (event) => {
    const worker = at(event);
    if (worker) onOpen(worker.worker);
  });

  /** Cells as large as fit: at most 22 pixels, and not so large that 1,000 take a screen. */
  function layOut(width) {
    const gap = 2;
    size = workers.length > 400 ? 13 : workers.length > 80 ? 17 : 22;
    const columns = Math.max(1, Math.floor((width + gap) / (size + gap)));
    cells = [];
    const labels = [];
    let y = 0;
    for (const role of ["prefill", "decode", "both"]) {
      const pool = workers.filter((worker) => worker.role === role);
      if (!pool.length) continue;
      labels.push({ y: y + 8, role, text: `${role} · ${pool.length}` });
      y += LABEL;
      pool.forEach((worker, i) => {
        const x = (i % columns) * (size + gap);
        cells.push({ x, y: y + Math.floor(i / columns) * (size + gap), worker });
      });
      y += Math.ceil(pool.length / columns) * (size + gap) + 8;
    }
    height = Math.max(24, y);
    return labels;
  }

  function draw() {
    const labels = layOut(element.clientWidth);
    element.style.setProperty("height", `${height}px`);
    const started = begin(element);
    if (!started) return;
    const { pen } = started;
    const value = MEASURES[measure][1];
    const isShare = measure === "kv" || measure === "cached";
    const top = isShare ? 1 : Math.max(1, ...workers.map(value));
    pen.font = `600 11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    for (const label of labels) {
      pen.fillStyle = colour(label.role);
      pen.fillText(label.text, 0, label.y);
    }
    const low = colour("heat-0");
    const high = colour("heat-1");
    for (const { x, y, worker } of cells) {
      pen.fillStyle = low;
      pen.fillRect(x, y, size, size);
      if (worker.state === "up") {
        pen.globalAlpha = Math.min(1, value(worker) / top);
        pen.fillStyle = high;
        pen.fillRect(x, y, size, size);
        pen.globalAlpha = 1;
      } else drawAbsent(pen, x, y, worker.state);
    }
  }

  /** Not by colour alone: a frame and a stroke. */
  function drawAbsent(pen, x, y, state) {
    pen.strokeStyle = colour(state === "down" ? "bad" : "warn");
    pen.lineWidth = 1.5;
    pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
    pen.beginPath();
    pen.moveTo(x + 2, y + size - 2);
    pen.lineTo(x + size - 2, y + 2);
    pen.stroke();
  }

  return {
    element: box,
    draw,
    update(all, by) {
      workers = all;
      measure = by;
      const absent = all.filter((worker) => worker.state !== "up").length;
      element.setAttribute("aria-label",
        `${plural(all.length, "worker")} by ${MEASURES[by][0]}, ${absent} not up. `
        + "The table of workers has the same, to be read and operated.");
      draw();
    },
  };
}
