// Batches with how far they are, and what can be done with them.

import { call, getJson } from "./api.js";
import { bar, count, empty, h, seconds, setText, toast } from "./dom.js";
import { poll } from "./poll.js";

const MOST = 100;
const TONES = { completed: "good", in_progress: "accent", failed: "bad", expired: "bad" };
const CANCELLABLE = ["validating", "in_progress"];
const FILES = ["input", "output", "error"];

export function batches() {
  let shown = "";
  const problem = h("p", { class: "notice bad", role: "alert", hidden: true });
  const body = h("tbody");
  const found = h("span", { class: "muted", role: "status" });
  const heads = ["Batch", "Status", "Answered", "Requests", "Failed", "Window", ""];
  const table = h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Batches" },
    h("table", { class: "sessions" },
      h("thead", {}, h("tr", {}, heads.map((text, i) => (text
        ? h("th", { scope: "col", class: i > 2 ? "num" : "", text })
        : h("td", { class: "head" }, h("span", { class: "hidden-text", text: "Actions" })))))),
      body));
  const none = empty("batches", "No batches",
    "POST /v1/batches makes one, or kvrelay batches run with a file of requests.");
  const element = h("div", {},
    h("div", { class: "head" }, h("h1", { text: "Batches" }), found), problem,
    h("section", { class: "panel" }, table, none));

  const asking = poll(element, async (signal) => {
    const answer = await getJson("tenant", `v1/batches?limit=${MOST}`, { signal });
    problem.hidden = true;
    draw(answer.data, answer.has_more);
  }, (error) => {
    problem.textContent = error.message;
    problem.hidden = false;
  });

  /** Rows are made anew only if something in them changed: what has the focus keeps it. */
  function draw(data, more) {
    table.hidden = !data.length;
    none.hidden = data.length > 0;
    const batches = data.length === 1 ? "1 batch" : `${data.length} batches`;
    setText(found, data.length ? `${batches}${more ? ", and more" : ""}` : "");
    const state = JSON.stringify([data, data.map(left)]);
    if (state === shown) return;
    shown = state;
    const focus = document.activeElement?.dataset?.what;
    body.replaceChildren(...data.map((each) => row(each, cancel)));
    if (focus) body.querySelector(`[data-what=${CSS.escape(focus)}]`)?.focus();
  }

  async function cancel(batch, button) {
    button.disabled = true;
    try {
      await call("tenant", "POST", `v1/batches/${encodeURIComponent(batch.id)}/cancel`);
      toast(`${batch.id} is being cancelled: it keeps the answers that it has`);
    } catch (error) {
      toast(error.message, true);
    }
    button.disabled = false;
    asking.run();
  }

  return { element, update() {}, start: asking.run, stop: asking.stop };
}

/** Of the window; by the minute, so that a row does not change with each look. */
function left(batch) {
  const isOpen = CANCELLABLE.includes(batch.status) || batch.status === "cancelling";
  const minutes = Math.max(0, Math.floor((batch.expires_at - Date.now() / 1000) / 60));
  return isOpen ? seconds(60 * minutes) : "";
}

function row(batch, cancel) {
  const { total, completed, failed } = batch.request_counts;
  const share = total ? 1 / total : 0;
  const files = FILES.map((kind) => [kind, batch[`${kind}_file_id`]]).filter(([, name]) => name);
  const wrong = batch.errors?.data?.[0];
  return h("tr", {},
    h("td", {}, h("b", { class: "wrap", text: batch.id }),
      h("span", { class: "muted below", text: batch.endpoint }),
      files.map(([kind, name]) => h("span", { class: "muted below wrap", text: `${kind}: ${name}` }))),
    h("td", {}, h("span", { class: `chip ${TONES[batch.status] ?? ""}`, text: batch.status }),
      wrong ? h("span", {
        class: "muted below wrap",
        text: `${wrong.line ? `line ${wrong.line}: ` : ""}${wrong.message}`,
      }) : null),
    h("td", { class: "tiers" },
      bar([[completed * share, "good"], [failed * share, "bad"]],
        `${completed} answered and ${failed} failed, of ${total}`)),
    h("td", { class: "num", text: count(total) }),
    h("td", { class: "num", text: count(failed) }),
    h("td", { class: "num", text: left(batch) }),
    h("td", { class: "buttons" }, CANCELLABLE.includes(batch.status) ? h("button", {
      class: "button small", type: "button", text: "Cancel", "aria-label": `Cancel ${batch.id}`,
      "data-what": `cancel ${batch.id}`,
      on: { click: (event) => cancel(batch, event.currentTarget) },
    }) : null));
}
