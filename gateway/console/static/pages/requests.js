// The slowest, latest and running requests: a bar of phases for each, and all of one in a dialog.

import { readRequest } from "../frame/api.js";
import { byId, h, patch } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { clock, count, ms } from "../frame/format.js";
import { KINDS, requestDetail } from "../frame/waterfall.js";

const NOBODY = { waiting: "Nobody waits.", running: "Nothing runs." };
const PHASES = [["http", "read"], ["admission", "wait"], ["queue", "queue"], ["prefill", "prefill"], ["first_frame", "frame"]];

let latest = null; // the lists, and how many gateways they are of

export function mount(view, { signal }) {
  view.append(byId("old-requests").content.cloneNode(true));
  byId("lists").addEventListener("change", () => latest && showRequests(...latest));
  const shown = ["read", "wait", "queue", "prefill", "frame", "decode"];
  byId("legend").append(...shown.map((kind) => h("span", {}, h("i", { class: kind }), kind === "decode" ? "further tokens" : KINDS[kind])));
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-request]");
    if (button) open(button.dataset.request);
  }, { signal });
  on("*", ({ requests, gateways }) => requests && gateways && showRequests(requests, gateways.length), { signal });
}

function showRequests(lists, gateways) {
  latest = [lists, gateways];
  const list = document.querySelector("#lists input:checked").value;
  const entries = lists[list];
  const longest = Math.max(1, ...entries.map((entry) => entry.total_ms ?? 0));
  const slowest = Math.max(1, ...entries.map((entry) => entry.ttft_ms ?? entry.total_ms ?? 0));
  patch(byId("request-list"), entries.length
    ? entries.map((entry) => row(entry, list === "slowest" ? slowest : longest, list === "slowest", gateways > 1))
    : [h("li", { class: "empty" }, NOBODY[list] ?? "No request yet.")]);
}

function row(entry, scale, untilFirst, manyGateways) {
  const failed = entry.status === "error" || entry.status === "cancelled";
  const workers = entry.decode_worker && entry.decode_worker !== entry.prefill_worker ? `${entry.prefill_worker} → ${entry.decode_worker}` : entry.prefill_worker;
  return h("li", { "data-key": entry.request_id },
    h("button", { type: "button", class: "link id", "data-request": entry.request_id, "aria-label": `Time line of ${entry.request_id}` }, shorten(entry.request_id)),
    h("span", { class: `status ${failed ? "bad" : ""}`, title: entry.detail }, entry.status, entry.num_attempts > 1 ? `, ${entry.num_attempts} attempts` : ""),
    h("span", { class: "where" }, manyGateways ? `${entry.gateway}: ${workers}` : workers),
    h("span", { class: "size num" }, `${count(entry.prompt_tokens)} in`, entry.cached_tokens ? ` (${count(entry.cached_tokens)} cached)` : "", `, ${count(entry.completion_tokens)} out`),
    h("span", { class: "when num" }, clock(entry.received_unix)),
    phases(entry, scale, untilFirst),
    h("span", { class: "ttft num" }, h("small", {}, "first "), ms(entry.ttft_ms)),
    h("span", { class: "total num" }, h("small", {}, "total "), ms(entry.total_ms)));
}

function phases(entry, scale, untilFirst) {
  const width = (value) => ({ width: `${Math.min(100, (100 * value) / scale)}%` });
  const parts = PHASES.filter(([phase]) => entry.phases_ms[phase]).map(([phase, kind]) => h("span", { class: kind, style: width(entry.phases_ms[phase]) }));
  if (!untilFirst && entry.ttft_ms !== null) parts.push(h("span", { class: "decode", style: width(entry.total_ms - entry.ttft_ms) }));
  if (entry.status === "waiting") parts.push(h("span", { class: "wait", style: width(entry.total_ms) }));
  return h("span", { class: "phases", "aria-hidden": "true" }, parts);
}

const shorten = (id) => id.replace(/^(chatcmpl|cmpl)-/, "").replace(/^([0-9a-zA-Z]{8})[0-9a-zA-Z]+/, "$1");

async function open(id) {
  const dialog = byId("detail");
  byId("detail-id").textContent = id;
  byId("detail-body").replaceChildren(h("p", { class: "empty" }, "Loading"));
  dialog.showModal();
  try {
    const found = await readRequest(id);
    byId("detail-body").replaceChildren(...found.map(requestDetail));
  } catch (error) {
    byId("detail-body").replaceChildren(h("p", { class: "note error" }, error.message));
  }
}
