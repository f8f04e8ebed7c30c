// A table of any length: only the rows that can be seen are elements.

import { h } from "./dom.js";

const SPARE = 4; // rows above and below those that are seen

/**
 * `columns`: [{key, title, value(row) to sort by, cell(row) -> node or text, width, num, wide}];
 * `wide` columns are left out on a narrow screen. `name(row)`: what tells rows apart.
 * `onOpen(row)`: a click, or Enter. A grid for the keyboard: arrows, page up and down, home, end.
 */
export function virtualTable(label, columns, name, onOpen, { rowHeight = 44 } = {}) {
  let rows = [];
  let sort = { key: columns[0].key, isDown: false };
  let active = null; // the name of the row that the keyboard is at
  let drawn = new Map(); // name -> {element, at, row}
  const narrow = window.matchMedia("(max-width: 700px)");

  const head = h("div", { class: "vt-head", role: "row", "aria-rowindex": "1" });
  const space = h("div", { class: "vt-space", role: "rowgroup" });
  const body = h("div", { class: "vt-body", role: "presentation" }, space);
  const grid = h("div", {
    class: "vt", role: "grid", "aria-label": label, tabindex: "0",
    on: { keydown: onKey },
  }, h("div", { role: "rowgroup", class: "vt-top" }, head), body);
  const id = `vt-${label.replace(/\W+/g, "-").toLowerCase()}`;

  function shownColumns() {
    return narrow.matches ? columns.filter((column) => !column.wide) : columns;
  }

  function drawHead() {
    const shown = shownColumns();
    const template = shown.map((column) =>
      (narrow.matches && column.narrow) || column.width || "1fr").join(" ");
    grid.style.setProperty("--columns", template);
    grid.setAttribute("aria-colcount", String(shown.length));
    head.replaceChildren(...shown.map((column) => {
      const isSorted = column.key === sort.key;
      const order = isSorted ? (sort.isDown ? "descending" : "ascending") : "none";
      return h("div", { role: "columnheader", "aria-sort": order, class: column.num ? "num" : "" },
        h("button", {
          type: "button", tabindex: "-1",
          on: { click: () => sortBy(column.key) },
        }, column.title, h("i", { "aria-hidden": true, class: isSorted ? order : "" })));
    }));
  }

  function sortBy(key) {
    const column = columns.find((each) => each.key === key);
    sort = { key, isDown: key === sort.key ? !sort.isDown : Boolean(column.num) };
    drawHead();
    order();
    draw(true);
  }

  function order() {
    const { value } = columns.find((column) => column.key === sort.key);
    const sign = sort.isDown ? -1 : 1;
    const keyed = rows.map((row) => [value(row), name(row), row]);
    keyed.sort((a, b) => sign * compare(a[0], b[0]) || compare(a[1], b[1]));
    rows = keyed.map((each) => each[2]);
  }

  function draw(isNew = false) {
    const height = `${rows.length * rowHeight}px`;
    if (space.style.height !== height) space.style.setProperty("height", height);
    grid.setAttribute("aria-rowcount", String(rows.length + 1));
    const first = Math.max(0, Math.floor(body.scrollTop / rowHeight) - SPARE);
    const last = Math.min(rows.length, first + Math.ceil(body.clientHeight / rowHeight) + 2 * SPARE);
    const before = drawn;
    drawn = new Map();
    for (let at = first; at < last; at++) {
      const row = rows[at];
      const key = name(row);
      const old = before.get(key);
      before.delete(key);
      const element = old && !isNew && old.row === row ? old.element : cells(row, old?.element);
      if (old?.at !== at) {
        element.style.setProperty("transform", `translateY(${at * rowHeight}px)`);
        element.setAttribute("aria-rowindex", String(at + 2));
      }
      const isActive = key === active;
      element.classList.toggle("active", isActive);
      element.setAttribute("aria-selected", String(isActive));
      if (isActive) element.id = `${id}-active`;
      else element.removeAttribute("id");
      if (!element.isConnected) space.append(element);
      drawn.set(key, { element, at, row });
    }
    for (const { element } of before.values()) element.remove();
    if (drawn.has(active)) grid.setAttribute("aria-activedescendant", `${id}-active`);
    else grid.removeAttribute("aria-activedescendant");
  }

  function cells(row, element) {
    const at = element ?? h("div", {
      class: "vt-row", role: "row",
      on: {
        click: () => {
          active = at.dataset.name;
          draw();
          open();
        },
      },
    });
    at.dataset.name = name(row);
    at.replaceChildren(...shownColumns().map((column) =>
      h("div", { role: "gridcell", class: column.num ? "num" : "" }, column.cell(row))));
    return at;
  }

  function open() {
    const row = rows.find((each) => name(each) === active);
    if (row) onOpen(row);
  }

  function onKey(event) {
    if (event.target !== grid) return;
    const page = Math.max(1, Math.floor(body.clientHeight / rowHeight) - 1);
    const steps = {
      ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity,
    };
    if (event.key === "Enter" || event.key === " ") open();
    else if (event.key in steps) {
      const from = rows.findIndex((row) => name(row) === active);
      const to = Math.max(0, Math.min(rows.length - 1, from + steps[event.key]));
      if (!rows.length) return;
      active = name(rows[to]);
      reveal(to);
      draw();
    } else return;
    event.preventDefault();
  }

  function reveal(at) {
    const top = at * rowHeight;
    if (top < body.scrollTop) body.scrollTop = top;
    const low = top + rowHeight - body.clientHeight;
    if (low > body.scrollTop) body.scrollTop = low;
  }

  let isAsked = false;
  body.addEventListener("scroll", () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  }, { passive: true });
  new ResizeObserver(() => draw()).observe(body);
  narrow.addEventListener("change", () => {
    drawHead();
    draw(true);
  });
  drawHead();

  return {
    element: grid,
    /** Rows that did not change have to be the same objects. */
    update(next) {
      rows = next;
      order();
      draw();
    },
  };
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
