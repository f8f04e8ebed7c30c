// A table of any length: only the rows that can be seen are elements.

import { h, setText } from "./dom.js";

const SPARE = 2; // rows above and below those that are seen

/**
 * `columns`: [{key, title, value(row) to sort by, cell(row) -> node or text, width, num, high, wide}];
 * `same(row)`: as long as that is the same, so is the node; for those whose cell is one;
 * `num` and `high` ones are sorted from the highest first,
 * `wide`: how wide the table has to be for it, in pixels. `name(row)`: what tells rows apart.
 * `onOpen(row)`: a click, or Enter. A grid for the keyboard: arrows, page up and down, home, end.
 */
export function virtualTable(label, columns, name, onOpen, { rowHeight = 44 } = {}) {
  let rows = [];
  let sort = { key: columns[0].key, isDown: false };
  let active = null; // the name of the row that the keyboard is at
  let drawn = new Map(); // name -> {element, at, row}
  let shown = []; // the columns that there is room for

  const head = h("div", { class: "vt-head", role: "row", "aria-rowindex": "1" });
  const space = h("div", { class: "vt-space", role: "rowgroup" });
  const grid = h("div", {
    class: "vt", role: "grid", "aria-label": label, tabindex: "0",
    on: { keydown: onKey },
  }, h("div", { role: "rowgroup", class: "vt-top" }, head), space);
  const id = `vt-${label.replace(/\W+/g, "-").toLowerCase()}`;

  function chooseColumns() {
    const width = grid.clientWidth || 1e9;
    const next = columns.filter((column) => width >= (column.wide ?? 0));
    const isNew = next.length !== shown.length;
    shown = next;
    return isNew;
  }

  function drawHead() {
    const isNarrow = grid.clientWidth < 640;
    const template = shown.map((column) =>
      (isNarrow && column.narrow) || column.width || "1fr").join(" ");
    grid.style.setProperty("--columns", template);
    grid.setAttribute("aria-colcount", String(shown.length));
    head.replaceChildren(...shown.map((column) => {
      const isSorted = column.key === sort.key;
      const order = isSorted ? (sort.isDown ? "descending" : "ascending") : "none";
      return h("div", { role: "columnheader", "aria-sort": order, class: column.num ? "num" : "" },
        h("button", {
          type: "button",
          on: { click: () => sortBy(column.key) },
        }, column.title, h("i", { "aria-hidden": true, class: isSorted ? order : "" })));
    }));
  }

  function sortBy(key) {
    const column = columns.find((each) => each.key === key);
    sort = { key, isDown: key === sort.key ? !sort.isDown : Boolean(column.num || column.high) };
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
    const first = Math.max(0, Math.floor(grid.scrollTop / rowHeight) - SPARE);
    const last = Math.min(rows.length, first + Math.ceil(grid.clientHeight / rowHeight) + 2 * SPARE);
    const before = drawn;
    drawn = new Map();
    const seen = rows.slice(first, last);
    // Elements of rows that are not seen any more are used for those that are new.
    const kept = new Set(seen.map(name));
    const spare = [...before].filter(([key]) => !kept.has(key)).map(([, old]) => old.element);
    if (isNew) for (const element of space.children) element.replaceChildren();
    for (let at = first; at < last; at++) {
      const row = rows[at];
      const key = name(row);
      const old = before.get(key);
      const element = old?.element ?? spare.pop() ?? newRow();
      if (isNew || old?.row !== row) fill(element, row);
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
    for (const element of spare) element.remove();
    if (drawn.has(active)) grid.setAttribute("aria-activedescendant", `${id}-active`);
    else grid.removeAttribute("aria-activedescendant");
  }

  function newRow() {
    const element = h("div", {
      class: "vt-row", role: "row",
      on: {
        click: () => {
          active = element.dataset.name;
          draw();
          open();
        },
      },
    });
    return element;
  }

  /** Only what is another than before is touched: style and layout are most of a frame's time. */
  function fill(element, row) {
    element.dataset.name = name(row);
    if (element.children.length !== shown.length) {
      element.replaceChildren(...shown.map((column) =>
        h("div", { role: "gridcell", class: column.num ? "num" : "" })));
    }
    shown.forEach((column, i) => {
      const cell = element.children[i];
      if (column.same) {
        const state = column.same(row);
        if (cell.state !== state) cell.replaceChildren(column.cell(row));
        cell.state = state;
      } else setText(cell, column.cell(row));
    });
  }

  function open() {
    const row = rows.find((each) => name(each) === active);
    if (row) onOpen(row);
  }

  function onKey(event) {
    if (event.target !== grid) return;
    const page = Math.max(1, Math.floor(grid.clientHeight / rowHeight) - 2);
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
    if (top < grid.scrollTop) grid.scrollTop = top;
    const low = top + rowHeight + head.offsetHeight - grid.clientHeight;
    if (low > grid.scrollTop) grid.scrollTop = low;
  }

  let isAsked = false;
  grid.addEventListener("scroll", () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  }, { passive: true });
  new ResizeObserver(() => {
    const isNew = chooseColumns();
    drawHead();
    draw(isNew);
  }).observe(grid);
  chooseColumns();
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

const names = new Intl.Collator("en", { numeric: true }); // to make one takes as long as a sort

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return names.compare(a, b);
}
