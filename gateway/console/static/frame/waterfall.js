// Where the time of one request went: rows of bars over one axis, and all that is known of it.

import { h, pairs, quietly, svg } from "./dom.js";
import { count, ms, plural } from "./format.js";
import { shortName } from "./names.js";
import { longest, movedWords, predictionWords, rowsOf, tpotOf, whereItWent } from "./parts.js";

export const KINDS = { read: "read", wait: "wait", queue: "queue", prefill: "prefill", frame: "first frame", transfer: "transfer", decode: "decode" };

// The drawing. With `zoom` the axis ends at the first token.
export function waterfall(detail, { zoom = false, title = "Time line of the request" } = {}) {
  const rows = rowsOf(detail);
  const last = Math.max(0.001, ...rows.map((row) => row.to), detail.total_ms ?? 0);
  const end = zoom && detail.ttft_ms ? Math.max(0.001, detail.ttft_ms) : last;
  const shown = rows.filter((row) => row.from < end || row.to <= end);
  const [slow, late] = [longest(rows), longest(rows, detail.ttft_ms ?? 0)];
  const marks = new Map([[late, "longest to the first token"], [slow, "longest"]]);
  return h("div", { class: "waterfall" }, h("ul", { "aria-label": title }, shown.map((row) => bar(row, end, detail.attempts?.length ? marks.get(row) : ""))), axis(end));
}

function bar(row, end, mark) {
  const left = Math.min(100, (100 * row.from) / end);
  const width = Math.max(0, Math.min(100, (100 * row.to) / end) - left);
  const label = row.attempt ? `${row.attempt}. ${row.label}` : row.label;
  return h("li", { title: row.note ?? "", class: mark ? "marked" : null },
    h("span", { class: "what" }, label),
    h("span", { class: "track", "aria-hidden": "true" },
      h("span", { class: `bar ${row.kind}`, style: { left: `${left}%`, width: `${width}%` } }),
      row.ticks?.length ? ticks(row.ticks, end) : null),
    h("span", { class: "num" }, ms(row.to - row.from)),
    mark ? h("span", { class: "mark-words" }, `◀ ${mark}`) : null,
    row.note ? h("span", { class: "hidden" }, `, ${row.note}`) : null,
    row.ticks ? h("span", { class: "hidden" }, `, ${plural(row.ticks.length, "frame")}`) : null);
}

function ticks(at, end) {
  const path = at.filter((one) => one <= end).map((one) => `M${((1000 * one) / end).toFixed(1)} 0V10`).join("");
  return svg("svg", { class: "ticks", viewBox: "0 0 1000 10", preserveAspectRatio: "none" }, svg("path", { d: path, "vector-effect": "non-scaling-stroke" }));
}

function axis(end) {
  return h("div", { class: "axis", "aria-hidden": "true" }, h("span", { class: "what" }),
    h("span", { class: "scale" }, [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", { style: { left: `${100 * part}%` } }, part ? ms(end * part) : "0"))),
    h("span", { class: "num" }));
}

// One line of figures, and how much of the prompt was cached.
export function figures(detail) {
  const parts = [
    ["TTFT", ms(detail.ttft_ms)],
    ["total", ms(detail.total_ms)],
    ["tokens", count(detail.completion_tokens)],
    ["TPOT", ms(tpotOf(detail))],
  ];
  if (detail.drafted_tokens) parts.push(["drafts accepted", `${count(detail.accepted_tokens)} of ${count(detail.drafted_tokens)}`]);
  if (detail.prompt_tokens) parts.push(["prompt cached", `${count(detail.cached_tokens)} of ${count(detail.prompt_tokens)}`]);
  const made = pairs("figures", parts);
  if (detail.prompt_tokens) made.append(h("div", { class: "cachebar", "aria-hidden": "true" }, h("span", { style: { width: `${(100 * detail.cached_tokens) / detail.prompt_tokens}%` } })));
  return made;
}

// Figures, drawing and a button that zooms to the first token.
export function requestView(detail) {
  const view = h("div", { class: "request" });
  let zoom = false;
  const draw = () => {
    const drawing = waterfall(detail, { zoom, title: `Time line of ${detail.request_id ?? "the answer"}` });
    const label = zoom ? "Show all of it" : "Zoom to first token";
    const canZoom = detail.ttft_ms > 0 && detail.total_ms > detail.ttft_ms;
    const button = canZoom ? quietly({ "aria-pressed": String(zoom) }, label) : null;
    button?.addEventListener("click", () => {
      zoom = !zoom;
      draw();
      view.querySelector("button").focus();
    });
    const words = whereItWent(detail);
    view.replaceChildren(...(words ? [h("p", { class: "went" }, words)] : []), figures(detail), drawing, ...(button ? [button] : []));
  };
  draw();
  return view;
}

const REASONS = {
  load: "a prefill worker, where its first token was expected earliest",
  prefix: "a prefill worker that had part of the prompt cached",
  full: "a prefill worker; every decode worker was full",
  "local: earlier": "on the decode worker: its first token was expected earlier there than after a handoff",
  "local: short": "on the decode worker: the uncached prompt was short",
  "local: no prefill worker": "on the decode worker: there was no prefill worker",
  "local: same worker": "on one worker: it was the best for both",
};

// Why it was placed there, in words.
export const placementWords = (reason) => REASONS[reason.replace("heartbeats: ", "")] ?? "";

// What the placement compared: an object of numbers, times in milliseconds, or a sentence.
function costsOf(costs) {
  if (typeof costs !== "object" || costs === null) return costs ? h("p", {}, String(costs)) : null;
  const entries = Object.entries(costs).filter(([name]) => name !== "predicted_ms").map(([name, value]) => (name.endsWith("_ms") ? [name.slice(0, -3), ms(value)] : [name.replaceAll("_", " "), count(value)]));
  return entries.length ? pairs("chips", entries) : null;
}

function attemptView(attempt, number, { detail, attempts }) {
  const many = attempts.length > 1;
  const { placement, transfer } = attempt;
  const facts = [
    ["placed", [placement.reason, placementWords(placement.reason)].filter(Boolean).join(": ")],
    ["predicted", predictionWords(attempt)],
    ["prefill", shortName(attempt.claimed_by || placement.prefill)],
    ["decode", attempt.decoder ? shortName(attempt.decoder) : placement.decode.map(shortName).join(", ")],
    ["compared", costsOf(placement.costs)],
    placement.promised_tokens ? ["prefix index", `knew ${count(placement.promised_tokens)} cached tokens of the prompt there`] : null,
    transfer ? ["KV", movedWords(attempt)] : null,
    attempt.because ? ["because", attempt.because] : null,
    attempt.outcome && attempt.outcome !== "ok" && attempt.outcome !== detail ? ["given up", attempt.outcome] : null,
  ].filter((fact) => fact && fact[1]);
  return h("section", { class: "attempt" }, h("h3", {}, many ? `Attempt ${number}: ${attempt.outcome || "runs"}` : "Placement"), pairs("facts", facts));
}

// All that is known of one request.
export function requestDetail(detail) {
  const attempts = detail.attempts ?? [];
  const facts = [["model", detail.model], ["tenant", detail.tenant], ["key", detail.key],
    ["received", detail.received_unix ? new Date(detail.received_unix * 1000).toLocaleString() : ""], ["trace", detail.trace_id], ["waited", detail.ahead ? `behind ${plural(detail.ahead, "request")}` : ""]];
  return h("article", { class: "detail" }, detail.attempts ? requestView(detail) : null,
    pairs("facts", facts.filter(([, value]) => value)), attempts.map((attempt, index) => attemptView(attempt, index + 1, detail)));
}
