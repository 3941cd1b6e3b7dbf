// A request's time as parts, and what they say in words. Pure: `detail` is an entry of /debug/requests/{id}, or what the page
// measured itself: {frame_ms, total_ms, ttft_ms}. Instants are milliseconds since the request was received.

import { bytes, count, ms, plural, share } from "./format.js";
import { shortName } from "./names.js";

const TOLD = 3; // parts in the sentence
const LEAST_SHARE = 0.03; // of a part in the sentence

// Rows {label, kind, from, to, note, ticks, aside}: those that are not `aside` follow each other. What is not known yet has no row.
export function rowsOf(detail) {
  const rows = [];
  const add = (label, kind, from, to, more = {}) => {
    if (from !== null && from !== undefined && to !== null && to !== undefined) rows.push({ label, kind, from, to: Math.max(from, to), ...more });
  };
  const frames = detail.frame_ms ?? [];
  const attempts = detail.attempts ?? [];
  if (!attempts.length && detail.ttft_ms !== null && detail.ttft_ms !== undefined) add("until first token", "prefill", 0, detail.ttft_ms);
  add("read, tokenise", "read", 0, detail.submitted_ms);
  if (detail.status === "waiting") add("admission", "wait", detail.submitted_ms, detail.total_ms);
  for (const [index, attempt] of attempts.entries()) {
    const before = rows.length;
    if (index === 0) add("admission", "wait", detail.submitted_ms, attempt.began_ms);
    for (const row of rowsOfAttempt(attempt, frames, detail.total_ms)) add(row.label, row.kind, row.from, row.to, row);
    const [given, next] = [attempt.ended_ms, attempts[index + 1]?.began_ms ?? detail.total_ms];
    if (given !== null && next > given && !["", "ok"].includes(attempt.outcome)) add("no worker", "wait", given, next, { note: "none could take it" });
    if (attempts.length > 1) for (const row of rows.slice(before)) row.attempt = index + 1;
  }
  if (!attempts.length && frames.length) add("tokens", "decode", frames[0], Math.max(detail.total_ms ?? 0, frames.at(-1)), { ticks: frames });
  return rows;
}

function rowsOfAttempt(attempt, frames, total) {
  const { placement, transfer, claimed_ms: claimed, first_token_ms: first } = attempt;
  const end = attempt.ended_ms ?? total;
  const rows = [
    { label: "placement", kind: "wait", from: attempt.began_ms, to: attempt.published_ms ?? end, note: placement.reason },
    { label: "queue", kind: "queue", from: attempt.published_ms, to: claimed ?? end },
  ];
  if (claimed === null) return rows;
  if (first === null) return [...rows, { label: "prefill", kind: "prefill", from: claimed, to: end, note: `${attempt.claimed_by}: not finished` }];
  const started = Math.min(first, claimed + (attempt.worker_queue_ms ?? 0));
  const computed = Math.min(first, started + (attempt.prefill_ms ?? 0));
  rows.push({ label: "worker's queue", kind: "queue", from: claimed, to: started, note: attempt.claimed_by },
    { label: "prefill", kind: "prefill", from: started, to: computed, note: attempt.claimed_by },
    { label: "first frame", kind: "frame", from: computed, to: first });
  if (transfer) rows.push({ label: "transfer", kind: "transfer", from: transfer.verified_ms - transfer.transfer_ms, to: transfer.verified_ms, note: movedWords(attempt), aside: true });
  const ticks = frames.filter((at) => at >= first && at <= end + 0.001);
  rows.push({ label: "decode", kind: "decode", from: first, to: Math.max(end, ticks.at(-1) ?? 0), ticks, note: attempt.decoder || attempt.claimed_by });
  return rows;
}

const took = (row) => row.to - row.from;

// The row that took longest of those that took time of their own, or null; `until`: of those that ended by then.
export function longest(rows, until = Infinity) {
  const own = rows.filter((row) => !row.aside && took(row) > 0 && row.to <= until + 0.001);
  return own.length ? own.reduce((most, row) => (took(row) > took(most) ? row : most)) : null;
}

// Where the time went, the longest part first: "72 % decode: 80 tokens, 9.5 ms each. 25 % prefill: 512 tokens, none cached."
export function whereItWent(detail, rows = rowsOf(detail)) {
  const spent = new Map();
  for (const row of rows) if (!row.aside) spent.set(row.label, (spent.get(row.label) ?? 0) + took(row));
  const total = [...spent.values()].reduce((sum, one) => sum + one, 0);
  if (!total || !detail.attempts?.length) return "";
  const told = [...spent].sort((one, other) => other[1] - one[1]).filter(([, time], index) => !index || time >= LEAST_SHARE * total).slice(0, TOLD);
  return told.map(([label, time]) => `${share(time, total).replace(" ", "\u00a0")} ${label}${about(label, detail)}.`).join(" ");
}

function about(label, detail) {
  if (label === "prefill") return `: ${plural(detail.prompt_tokens, "token")}, ${detail.cached_tokens ? `${count(detail.cached_tokens)} of them cached` : "none cached"}`;
  if (label === "admission") return detail.ahead ? `: behind ${plural(detail.ahead, "request")}` : "";
  if (label === "no worker") return ": none could take it";
  if (label !== "decode") return "";
  const each = tpotOf(detail);
  return `: ${plural(detail.completion_tokens, "token")}${each === null ? "" : `, ${ms(each)} each`}`;
}

// Milliseconds a token behind the first one, or null.
export const tpotOf = ({ completion_tokens: tokens, ttft_ms: first, total_ms: total }) => (tokens > 1 && first !== null && first !== undefined ? (total - first) / (tokens - 1) : null);

// What was handed over, in sentences.
export function movedWords({ claimed_by: from, decoder, transfer }) {
  if (!transfer.blocks) return `Nothing had to be moved: ${shortName(decoder)} had all ${plural(transfer.reused_blocks, "block")}.`;
  const there = transfer.reused_blocks ? `; ${count(transfer.reused_blocks)} more ${transfer.reused_blocks === 1 ? "was" : "were"} there already` : "";
  const moved = `${plural(transfer.blocks, "block")} (${bytes(transfer.bytes)}) went from ${shortName(from)} to ${shortName(decoder)}${there}.`;
  if (!transfer.push_ms) return moved;
  const late = transfer.late_push_ms ?? 0;
  const hidden = late < 0.05 ? "all of it while the prompt was still computed" : late > 0.95 * transfer.push_ms ? "after the prompt was computed" : `${ms(late)} of it after the prompt was computed`;
  return `${moved} Copying took ${ms(transfer.push_ms)}, ${hidden}.`;
}

// The time to the first token of the attempt, predicted and as it was, in words; "" without a prediction.
export function predictionWords({ began_ms: began, first_token_ms: first, placement }) {
  const { predicted_ms: predicted } = placement.costs;
  if (!(predicted >= 0)) return "";
  return first === null ? `${ms(predicted)} to the first token` : `${ms(predicted)} to the first token; it took ${ms(first - began)}`;
}
