// What is known of the cluster: the events of the server, put together.

import { call, CallError, events } from "./api.js";

const SILENT_MS = 6000; // an event comes every second

const ALL = ""; // models

/** Owned by the page. `workers`: by name, each an object of the server's fields; `series`: by model,
 * objects with their time `at`, the oldest first; `link`: connecting, live, stale or locked;
 * `model`: that is shown, where there are several. */
class Store extends EventTarget {
  constructor() {
    super();
    this.link = "connecting";
    this.problem = "";
    this.parts = {};
    this.workers = new Map();
    this.series = { [ALL]: [] };
    this.model = ALL;
    this.fields = { worker: [], point: [] };
    this.stop = null;
  }

  /** What is known of the model that is shown, or of all. */
  get shown() {
    const { load, totals, scaling, models = [] } = this.parts;
    const row = models.find((each) => each.model === this.model);
    const workers = [...this.workers.values()];
    return row
      ? { load: row, totals: row, workers: workers.filter((w) => w.model === this.model),
        scaling: { [this.model]: row.scaling } }
      : { load, totals, workers,
        scaling: models.length
          ? Object.fromEntries(models.map((each) => [each.model, each.scaling]))
          : { [ALL]: scaling } };
  }

  get points() {
    return this.series[this.model] ?? [];
  }

  get hasSeveral() {
    return (this.parts.models ?? []).length > 0;
  }

  /** As part of a query, for calls that are of one model. */
  query(sign) {
    return this.model ? `${sign}model=${encodeURIComponent(this.model)}` : "";
  }

  get hasData() {
    return this.parts.server !== undefined;
  }

  /** Listen anew, say with another key; goes on for ever. */
  async listen() {
    this.stop?.abort();
    const mine = new AbortController();
    this.stop = mine;
    let wait = 500;
    while (!mine.signal.aborted) {
      try {
        if (await this.read(mine.signal)) wait = 500;
      } catch (error) {
        if (mine.signal.aborted) return;
        const isLocked = error instanceof CallError && [401, 403].includes(error.status);
        this.tell(isLocked ? "locked" : "stale", error.message);
        if (isLocked) return;
      }
      if (mine.signal.aborted) return;
      if (this.link === "live") this.tell("stale", "The server has closed the connection");
      await new Promise((resolve) => setTimeout(resolve, wait * (0.75 + Math.random() / 2)));
      wait = Math.min(10000, wait * 2);
    }
  }

  /** One connection, until it ends. True: something came. */
  async read(signal) {
    const connection = new AbortController();
    const end = () => connection.abort();
    signal.addEventListener("abort", end, { once: true });
    let timer = setTimeout(end, SILENT_MS);
    let hasCome = false;
    try {
      const response = await call("operator", "GET", "console/events",
        { signal: connection.signal });
      for await (const data of events(response)) {
        clearTimeout(timer);
        timer = setTimeout(end, SILENT_MS);
        this.take(JSON.parse(data));
        hasCome = true;
      }
    } catch (error) {
      if (error.name !== "AbortError" || signal.aborted) throw error;
      this.tell("stale", "The server is silent");
    } finally {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
    }
    return hasCome;
  }

  take(news) {
    if (news.full) {
      this.parts = {};
      this.workers = new Map();
      this.series = {};
      this.fields = { worker: news.worker_fields, point: news.point_fields };
      this.texts = news.worker_facts;
    }
    Object.assign(this.parts, news.parts);
    for (const name of news.gone ?? []) this.workers.delete(name);
    for (const [name, row] of Object.entries(news.workers)) {
      this.workers.set(name, named(this.fields.worker, row));
    }
    if (!this.parts.models.some((each) => each.model === this.model)) this.model = ALL;
    const most = this.parts.server.kept_s / this.parts.server.period_s;
    const added = { [ALL]: news.points, ...news.points_by_model };
    this.series = Object.fromEntries(Object.entries(added).map(([model, points]) => {
      const made = points.map((point) => named(this.fields.point, point));
      return [model, [...(this.series[model] ?? []), ...made].slice(-most)];
    }));
    this.tell("live", "");
  }

  tell(link, problem) {
    const isNew = link !== this.link || problem !== this.problem;
    this.link = link;
    this.problem = problem;
    if (isNew) this.dispatchEvent(new Event("link"));
    if (link === "live") this.dispatchEvent(new Event("change"));
  }
}

function named(fields, row) {
  const found = {};
  for (let i = 0; i < fields.length; i++) found[fields[i]] = row[i];
  return found;
}

export const store = new Store();

/** The workers that are shown of each role that has any, and what they are together. */
export function pools() {
  const found = new Map();
  for (const worker of store.shown.workers) {
    let pool = found.get(worker.role);
    if (!pool) {
      pool = { role: worker.role, workers: 0, up: 0, steps: [] };
      for (const key of SUMS) pool[key] = 0;
      found.set(worker.role, pool);
    }
    pool.workers += 1;
    if (worker.state === "up") pool.up += 1;
    for (const key of SUMS) pool[key] += worker[key] ?? 0;
    if (worker.decode_step_s) pool.steps.push(worker.decode_step_s);
  }
  const order = ["prefill", "decode", "both"];
  return [...found.values()].sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role));
}

const SUMS = [
  "num_blocks", "num_used_blocks", "num_cached_blocks", "num_host_blocks", "num_disk_blocks",
  "num_running", "num_waiting", "pending_prefill_tokens", "prefill_tokens_per_s",
];

export function median(values) {
  if (!values.length) return null;
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[sorted.length >> 1];
}
