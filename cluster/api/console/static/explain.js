// One request: its phases as they followed each other, and the candidates of each attempt.

import { count, facts, h, legend, percent, seconds } from "./dom.js";

const COST_COLOURS = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6", "series-7"];

export function explanation(found) {
  return h("div", { class: "explain" },
    h("h2", { class: "mono wrap", text: found.request }),
    facts(headFacts(found)),
    prefixPart(found.prefix),
    phasesPart(found),
    found.attempts.map(attemptPart));
}

function headFacts(found) {
  const { usage, prediction } = found;
  const details = usage.prompt_tokens_details ?? {};
  const sources = Object.entries(details.cached_tokens_by_source ?? {});
  const from = sources.map(([name, tokens]) => `${count(tokens)} ${name}`).join(", ");
  const pairs = [
    ["Outcome", `${found.outcome} (${found.endpoint})`],
    ["First token", seconds(found.ttft_s)],
    ["End to end", seconds(found.e2e_s)],
    ["Tokens in", count(usage.prompt_tokens)],
    ["Of which cached", from ? `${count(details.cached_tokens)} (${from})`
      : count(details.cached_tokens ?? 0)],
    ["Tokens out", count(usage.completion_tokens)],
  ];
  if (found.session) pairs.push(["Session", found.session]);
  if (prediction) {
    pairs.push(["Predicted", `${seconds(prediction.predicted_s)}, was ${seconds(prediction.real_s)} `
      + `(${percent(prediction.relative_error)} off)`]);
  }
  return pairs;
}

function prefixPart(prefix) {
  if (!prefix) return h("p", { class: "hint", text: "Begins as no earlier prompt that is known." });
  const common = `${count(prefix.common_tokens)} of ${count(prefix.earlier_tokens)} tokens`;
  const earlier = h("a", { class: "mono", href: `#/requests/${prefix.earlier}` },
    prefix.earlier.slice(0, 12));
  if (prefix.is_continued) {
    return h("p", { class: "hint" }, "Goes on after all ", count(prefix.common_tokens), " tokens of ",
      earlier, ".");
  }
  const line = (name, text) => [h("dt", { text: name }), h("dd", { class: "mono", text })];
  return h("div", {},
    h("p", { class: "hint" }, "Shares the first ", common, " with ", earlier, "."),
    h("dl", { class: "prefix" }, line("after", prefix.before), line("came", prefix.earlier_text),
      line("comes", prefix.text)));
}

function phasesPart(found) {
  const whole = found.phases.reduce((sum, phase) => sum + phase.seconds, 0) || 1;
  let before = 0;
  const rows = found.phases.map((phase) => {
    const start = before;
    before += phase.seconds;
    const share = phase.seconds / whole;
    const fill = h("i", {
      class: phase.to_first ? "first" : "later",
      style: { "margin-left": `${(100 * start) / whole}%`, width: `max(2px, ${100 * share}%)` },
    });
    return h("tr", {},
      h("th", { scope: "row" }, phase.name.replaceAll("_", " "),
        phase.worker ? h("span", { class: "muted", text: phase.worker }) : null),
      h("td", { class: "track" }, h("div", {}, fill)),
      h("td", { class: "num" }, h("b", { text: seconds(phase.seconds) }),
        h("span", { class: "muted", text: percent(share) })));
  });
  return h("div", {},
    h("h3", { class: "gap", text: "Phases" }),
    h("table", { class: "phases" },
      h("thead", { class: "hidden-text" }, h("tr", {}, ["Phase", "When", "Time"].map((text) =>
        h("th", { scope: "col", text })))),
      h("tbody", {}, rows)),
    legend([["series-1", "until the first token", seconds(found.ttft_s)],
      ["series-2", "after it", found.ttft_s === null ? "–" : seconds(found.e2e_s - found.ttft_s)]]));
}

function attemptPart(attempt) {
  const parts = [`decoded by ${attempt.decode}`];
  if (attempt.prefill) parts.push(`prompt computed by ${attempt.prefill}`);
  if (attempt.fetch_from) parts.push(`prefix from ${attempt.fetch_from}`);
  if (attempt.cause) parts.push(`given up: ${attempt.cause}`);
  const { decision } = attempt;
  return h("div", {},
    h("h3", { class: "gap", text: `Attempt ${attempt.number}` }),
    h("p", { text: `${parts.join(", ")}.` }),
    decision === null ? null : [
      h("p", { class: "hint", text: `${decision.reason}.` }),
      candidates("Candidates", decision.decode_candidates),
      decision.prefill_candidates.length
        ? candidates("For the prompt", decision.prefill_candidates) : null,
    ]);
}

function candidates(title, list) {
  const names = Object.keys(list[0]?.seconds ?? {});
  const used = names.filter((name) => list.some((each) => each.seconds[name] > 0));
  const tone = (name) => COST_COLOURS[names.indexOf(name) % COST_COLOURS.length];
  const most = Math.max(...list.map((each) => each.total_s), 1e-9);
  const rows = list.map((each, i) => {
    const held = Object.entries(each.cached_tokens).filter(([, tokens]) => tokens);
    const parts = used.map((name) => `${name.replaceAll("_", " ")} ${seconds(each.seconds[name])}`);
    return h("tr", { class: i ? "" : "winner" },
      h("th", { scope: "row" }, each.name, i ? null : h("span", { class: "chip accent", text: "chosen" }),
        h("span", { class: "muted", text: held.length
          ? `${held.map(([tier, tokens]) => `${count(tokens)} ${tier}`).join(", ")} cached`
          : "nothing cached" })),
      h("td", { class: "track" }, h("div", { class: "bar", role: "img", "aria-label": parts.join(", "),
        title: parts.join(", ") },
      used.map((name) => h("i", { style: {
        width: `${(100 * each.seconds[name]) / most}%`, background: `var(--${tone(name)})`,
      } })))),
      h("td", { class: "num" }, h("b", { text: seconds(each.total_s) })));
  });
  return h("div", {},
    h("table", { class: "phases" },
      h("caption", { class: "hidden-text", text: title }),
      h("thead", { class: "hidden-text" }, h("tr", {}, [title, "Cost by part", "Cost"].map((text) =>
        h("th", { scope: "col", text })))),
      h("tbody", {}, rows)),
    legend(used.map((name) => [tone(name), name.replaceAll("_", " ")])));
}
