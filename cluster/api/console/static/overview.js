// The cluster at a glance: figures, latencies over time, pools, KV by tier, the whole fleet.

import { lineChart, spark } from "./charts.js";
import {
  bar, count, empty, facts, h, legend, panel, percent, plural, roleText, seconds, segments,
  setText, stateChip,
} from "./dom.js";
import { fleetMap, MEASURES } from "./fleet.js";
import { median, pools, store } from "./store.js";
import { openWorker } from "./worker.js";

const TILES = [
  ["workers", "Workers up", null],
  ["live", "Live requests", (p) => p.live],
  ["output", "Output tokens/s", (p) => p.output_tokens],
  ["ttft", "TTFT p99", (p) => p.ttft_p99],
  ["itl", "ITL p99", (p) => p.itl_p99],
  ["hits", "Cache hit rate", (p) => (p.prompt_tokens ? p.cached_tokens / p.prompt_tokens : 0)],
];
const PERCENTILES = [["p50", "p50", "series-1"], ["p90", "p90", "series-2"], ["p99", "p99", "series-3"]];
const SPANS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];

let span = 300;
let measure = "kv";

export function overview() {
  const tiles = new Map(TILES.map(([key, title, value]) => [key, tile(title, value)]));
  const of = (what) => PERCENTILES.map(([p, name, line]) => [`${what}_${p}`, name, line]);
  const window_ = `of ${seconds(store.parts.server.window_s)} each`;
  const charts = [
    lineChart("Time to first token", window_, of("ttft"), seconds),
    lineChart("Time between tokens", window_, of("itl"), seconds),
    lineChart("Tokens per second", "of this router", [
      ["prompt_tokens", "prompt", "series-1"],
      ["cached_tokens", "of which cached", "series-2"],
      ["output_tokens", "output", "series-3"],
    ], count),
  ];
  const tiers = panel("KV by tier");
  const poolPanel = panel("Pools");
  const routers = panel("Routers");
  const map = fleetMap(openWorker);
  const fleet = h("section", { class: "panel wide" },
    h("header", {}, h("h2", { text: "Fleet" }),
      h("span", { class: "legend" }, h("span", {}, "low", h("i", { class: "heat" }), "high"),
        h("span", {}, h("i", { class: "absent" }), "not up")),
      h("span", { class: "grow" }),
      segments("What the fleet shows", Object.entries(MEASURES).map(([k, v]) => [k, v[0]]),
        measure, (next) => {
          measure = next;
          map.update(sorted(), measure);
        })),
    h("div", { class: "body" }, map.element));
  const range = segments("Time shown", SPANS, span, (next) => {
    span = next;
    update();
  });
  const element = h("div", {},
    h("div", { class: "head" }, h("h1", { text: "Overview" }), h("span", { class: "grow" }), range),
    h("div", { class: "tiles" }, [...tiles.values()].map((each) => each.element)),
    h("div", { class: "cards" }, charts.map((chart) => chart.panel), poolPanel, tiers, routers,
      fleet));

  function update() {
    updateTiles(tiles);
    for (const chart of charts) chart.update(store.points, span);
    const found = pools();
    fill(poolPanel, poolTable(found));
    fill(tiers, ...tierBars(found));
    const all = store.parts.routers ?? [];
    routers.hidden = all.length < 2 && !store.parts.store;
    if (!routers.hidden) fill(routers, routerTable(all), ...storeFacts());
    map.update(sorted(), measure);
  }

  return {
    element,
    update,
    redraw() {
      for (const each of [...charts, ...tiles.values(), map]) each.draw();
    },
  };
}

const names = new Intl.Collator("en", { numeric: true });

function sorted() {
  return [...store.shown.workers].sort((a, b) => names.compare(a.worker, b.worker));
}

function fill(where, ...content) {
  where.querySelector(".body").replaceChildren(...content);
}

function tile(title, value) {
  const figure = h("b", { text: "–" });
  const more = h("span", { class: "more" });
  const line = value ? spark("accent") : null;
  return {
    element: h("div", { class: "tile panel" }, h("span", { class: "name", text: title }),
      h("div", { class: "row" }, figure, more), line?.element),
    set(text, below, tone) {
      setText(figure, text);
      setText(more, below);
      more.className = tone ? `more ${tone}` : "more";
      line?.update(store.points.slice(-span).map(value));
    },
    draw() {
      line?.draw();
    },
  };
}

function updateTiles(tiles) {
  const { load, totals, workers } = store.shown;
  const up = workers.filter((worker) => worker.state === "up").length;
  const point = store.points.at(-1) ?? {};
  const away = workers.length - up;
  tiles.get("workers").set(`${up}`, away ? `of ${workers.length}, ${away} not up` : "all of them",
    away ? "bad" : "");
  tiles.get("live").set(count(load.num_live ?? 0), `${count(load.num_queued ?? 0)} queued`,
    load.num_queued ? "warn" : "");
  tiles.get("output").set(count(point.output_tokens), `${count(point.requests)} requests/s`);
  tiles.get("ttft").set(seconds(point.ttft_p99), `p50 ${seconds(point.ttft_p50)}`);
  tiles.get("itl").set(seconds(point.itl_p99), `p50 ${seconds(point.itl_p50)}`);
  tiles.get("hits").set(percent(load.cache_hit_rate), `of ${count(totals.prompt_tokens ?? 0)} tokens`);
}

function poolTable(found) {
  if (!found.length) return empty("workers", "No workers", "None has reported to this router yet.");
  const heads = [
    ["Pool"], ["Workers", "num"], ["KV held"], ["Running", "num"], ["Waiting", "num"],
    ["Prefill", "num"], ["Decode step", "num"],
  ];
  return h("div", { class: "scroll-x flush", tabindex: "0", role: "region", "aria-label": "Pools" },
    h("table", {},
      h("thead", {}, h("tr", {}, heads.map(([text, c]) => h("th", { scope: "col", class: c, text })))),
      h("tbody", {}, found.map((pool) => {
        const used = pool.num_used_blocks / (pool.num_blocks || 1);
        return h("tr", {},
          h("td", {}, roleText(pool.role)),
          h("td", { class: "num" }, `${pool.up}`,
            h("span", { class: "muted", text: ` / ${pool.workers}` })),
          h("td", {}, h("div", { class: "meter" },
            bar([[used, pool.role]], `${percent(used)} of the blocks held by requests`),
            h("span", { text: percent(used) }))),
          h("td", { class: "num", text: count(pool.num_running) }),
          h("td", { class: "num", text: count(pool.num_waiting) }),
          h("td", { class: "num" }, count(pool.prefill_tokens_per_s),
            h("span", { class: "muted", text: " tok/s" })),
          h("td", { class: "num", text: seconds(median(pool.steps)) }));
      }))));
}

function tierBars(found) {
  const sum = (key) => found.reduce((total, pool) => total + pool[key], 0);
  const blocks = sum("num_blocks") || 1;
  const used = sum("num_used_blocks");
  const cached = sum("num_cached_blocks");
  const most = Math.max(blocks, sum("num_host_blocks"), sum("num_disk_blocks"));
  const line = (name, number, parts, text) => h("div", { class: "tier" },
    h("span", { text: name }),
    h("span", { class: "num" }, h("b", { text: count(number) }), h("span", { class: "muted", text })),
    bar(parts, `${name}: ${count(number)}${text}`));
  const sources = Object.entries(store.shown.totals.cached_tokens_by_source ?? {});
  const hits = sources.reduce((total, [, tokens]) => total + tokens, 0);
  const shown = [
    line("Device, held", used, [[used / most, "device"]],
      ` of ${count(blocks)} blocks (${percent(used / blocks)})`),
    line("Device, cached", cached, [[cached / most, "cached"]],
      ` of ${count(blocks)} blocks (${percent(cached / blocks)})`),
    line("Host memory", sum("num_host_blocks"), [[sum("num_host_blocks") / most, "host"]], " blocks"),
    line("Disk", sum("num_disk_blocks"), [[sum("num_disk_blocks") / most, "disk"]], " blocks"),
  ];
  if (!hits) return shown;
  const tone = (name) => (["device", "host", "disk", "peer"].includes(name) ? name : "series-5");
  return [
    ...shown,
    h("h3", { class: "gap", text: "Where cached tokens came from" }),
    bar(sources.map(([name, tokens]) => [tokens / hits, tone(name)]),
      sources.map(([name, tokens]) => `${name} ${count(tokens)}`).join(", "), true),
    legend(sources.map(([name, tokens]) => [tone(name), name, count(tokens)])),
  ];
}

function routerTable(all) {
  return h("div", { class: "scroll-x flush", tabindex: "0", role: "region", "aria-label": "Routers" },
    h("table", {},
      h("thead", {}, h("tr", {}, ["Router", "State", "API", "Live", "Queued"].map((text, i) =>
        h("th", { scope: "col", class: i > 2 ? "num" : "", text })))),
      h("tbody", {}, all.map((router) => h("tr", {},
        h("td", { text: router.router }),
        h("td", {}, stateChip(router.state)),
        h("td", { class: "mono", text: router.url ?? "" }),
        h("td", { class: "num", text: count(router.num_live) }),
        h("td", { class: "num", text: count(router.num_queued) }))))));
}

function storeFacts() {
  const state = store.parts.store;
  if (!state) return [];
  return [
    h("h3", { class: "gap", text: "Shared state" }),
    facts([
      ["Redis", stateChip(state.up ? "up" : "down")],
      ["Not written yet", count(state.unwritten)],
      ["Outages", plural(state.outages ?? 0, "time")],
    ]),
  ];
}
