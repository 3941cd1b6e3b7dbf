// The fleet: gateways and workers in columns, links between them, hand-overs that run along the links.

import { ApiError, key, setDraining, setRoles } from "../frame/api.js";
import { byId, confirmed, h, patch, svg, toast } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { ago, bytes, count, ms, plural, rate, share } from "../frame/format.js";
import { openKeys } from "../frame/keys.js";

const COLUMNS = [
  ["Prefill", (worker) => worker.roles.length === 1 && worker.roles[0] === "prefill"],
  ["Prefill and decode", (worker) => worker.roles.length !== 1],
  ["Decode", (worker) => worker.roles.length === 1 && worker.roles[0] === "decode"],
];
const CHOICES = { Prefill: ["prefill"], Decode: ["decode"], Both: ["prefill", "decode"] };
const seen = new Set(); // hand-overs that were drawn
const still = matchMedia("(prefers-reduced-motion: reduce)");
let latest = null;
let before = null; // the totals of the picture before, for rates
let ahead = 0; // seconds that this clock is ahead of the gateway's

export function mount(view, { signal }) {
  view.append(byId("old-fleet").content.cloneNode(true));
  byId("columns").addEventListener("click", (event) => {
    const button = event.target.closest("button[data-worker]");
    if (button) operate(button);
  });
  byId("manage").addEventListener("click", () => openKeys("admin"));
  const size = new ResizeObserver(drawWires);
  size.observe(byId("map"));
  const ages = setInterval(showAges, 1000);
  signal.addEventListener("abort", () => {
    size.disconnect();
    clearInterval(ages);
  });
  on("fleet", showFleet, { signal });
}

function showFleet(state) {
  addRates(state);
  latest = state;
  ahead = Date.now() / 1000 - state.time_unix;
  const manages = Boolean(key("admin"));
  byId("manage").hidden = manages;
  byId("manage").disabled = !state.has_admin;
  byId("manage").title = state.has_admin ? "" : "Start the gateway with an admin key to manage workers here";
  const columns = COLUMNS.map(([name, holds]) => [name, state.workers.filter(holds)]).filter(([, workers]) => workers.length);
  patch(byId("columns"), [
    column("Gateways", state.gateways.map((gateway) => gatewayCard(gateway, state))),
    ...columns.map(([name, workers]) => column(name, workers.map((worker) => workerCard(worker, manages)))),
    state.workers.length ? null : h("p", { class: "empty", "data-key": "empty" }, "No worker is heard. Start one: ./baton up, ./baton prefill, ./baton decode."),
  ]);
  showLinks(state);
  showHandovers(state);
  if (state.placed) showCounts(state);
  drawWires();
  for (const move of [...state.handovers].reverse()) if (!seen.has(move.id)) pulse(move);
  const listed = new Set(state.handovers.map((move) => move.id));
  for (const id of seen) if (!listed.has(id)) seen.delete(id);
  for (const id of listed) seen.add(id);
}

// Generated tokens a second of each worker, from its totals of two states.
function addRates(state) {
  const passed = before ? state.time_unix - before.time_unix : 0;
  for (const worker of state.workers) {
    const old = before?.workers.find((one) => one.id === worker.id && one.incarnation === worker.incarnation);
    if (passed > 0.2 && old) worker.tokens_per_s = Math.max(0, worker.generated_tokens - old.generated_tokens) / passed;
    else worker.tokens_per_s = old?.tokens_per_s;
  }
  if (!before || passed > 0.2) before = { time_unix: state.time_unix, workers: state.workers };
}

const column = (name, cards) => h("div", { class: "column", "data-key": name }, h("h3", {}, name), cards);

function gatewayCard(gateway, state) {
  const here = gateway.id === state.gateway;
  return h("article", { class: "card", "data-key": `g:${gateway.id}`, "data-node": "gateway" },
    h("h4", {}, gateway.id, here ? h("span", { class: "tag" }, "this one") : null),
    numbers([
      ["in flight", count(gateway.in_flight)],
      ["unclaimed", count(gateway.queued_requests)],
      ["waiting", `${count(gateway.waiting_tokens)} tok`],
      ["handing over", count(gateway.handing_over)],
    ]));
}

function workerCard(worker, manages) {
  const left = worker.running + worker.waiting;
  const status = worker.status === "draining" && !left && !worker.queued_tokens && !worker.kv_held ? "drained" : worker.status;
  return h("article", { class: "card", "data-key": `w:${worker.id}`, "data-node": worker.id },
    h("h4", {}, h("span", { class: `dot ${status}`, "aria-hidden": "true" }), worker.id, h("span", { class: `tag ${status}` }, status)),
    kvBar(worker),
    numbers([
      ["running", `${count(worker.running)} of ${count(worker.max_sequences)}`],
      ["waiting", count(worker.waiting)],
      ["to prefill", `${count(worker.queued_tokens)} tok`],
      worker.tokens_per_s === undefined || (!worker.tokens_per_s && !worker.roles.includes("decode")) ? null : ["decoding", `${count(worker.tokens_per_s)} tok/s`],
      worker.prefill_tokens_per_s ? ["prefills", `${count(worker.prefill_tokens_per_s)} tok/s`] : null,
      worker.decode_step_ms ? ["step", ms(worker.decode_step_ms)] : null,
      worker.link_bytes_per_s ? ["slowest link", rate(worker.link_bytes_per_s)] : null,
    ]),
    manages ? controls(worker) : null);
}

function kvBar(worker) {
  const width = (blocks) => ({ width: `${(100 * blocks) / Math.max(1, worker.kv_blocks)}%` });
  const text = `${share(worker.kv_used, worker.kv_blocks)} used${worker.kv_held ? `, ${share(worker.kv_held, worker.kv_blocks)} held` : ""}`;
  return h("div", { class: "kv", title: `${count(worker.kv_used)} used and ${count(worker.kv_held)} held of ${plural(worker.kv_blocks, "block")} of ${worker.block_tokens} tokens, ${bytes(worker.block_bytes)} each` },
    h("span", { class: "kvname" }, "KV"),
    h("span", { class: "kvbar", "aria-hidden": "true" }, h("span", { class: "used", style: width(worker.kv_used) }), h("span", { class: "held", style: width(worker.kv_held) })),
    h("span", { class: "num" }, text));
}

const numbers = (pairs) => h("dl", { class: "numbers" }, pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

function controls(worker) {
  const now = [...worker.roles].sort().join();
  const draining = worker.status === "draining";
  const choices = Object.entries(CHOICES).map(([name, roles]) => {
    const chosen = [...roles].sort().join() === now;
    return h("button", { type: "button", "data-worker": worker.id, "data-roles": roles.join(), "aria-pressed": String(chosen), disabled: draining }, name);
  });
  return h("div", { class: "controls", role: "group", "aria-label": `Manage ${worker.id}` },
    h("span", { class: "segments" }, choices),
    h("button", { type: "button", "data-worker": worker.id, "data-drain": String(!draining) }, draining ? "Resume" : "Drain"));
}

async function operate(button) {
  const { worker, roles, drain } = button.dataset;
  if (button.getAttribute("aria-pressed") === "true") return;
  const wanted = roles?.split(",") ?? [];
  const left = latest.workers.filter((other) => other.id !== worker && other.status === "ready");
  const lost = latest.workers.find((one) => one.id === worker).roles.filter((role) => !wanted.includes(role));
  const last = lost.filter((role) => !left.some((other) => other.roles.includes(role)));
  const warning = last.length ? ` Nobody else takes ${last.join(" or ")}: ${last.includes("decode") ? "no request is served until somebody does" : "prompts are computed by decode workers until somebody does"}.` : "";
  if (drain === "true" && !(await confirmed(`Drain ${worker}?`, `It takes no new work; what it has begun goes on to its end.${warning}`, "Drain"))) return;
  if (roles && warning && !(await confirmed(`Make ${worker} ${wanted.join(" and ")} only?`, `What it has begun goes on to its end.${warning}`, "Switch"))) return;
  button.disabled = true;
  try {
    if (roles) await setRoles(worker, wanted);
    else await setDraining(worker, drain === "true");
    toast(roles ? `${worker} takes new work of ${wanted.join(" and ")}.` : `${worker} ${drain === "true" ? "takes no new work" : "takes work again"}.`);
  } catch (error) {
    toast(error instanceof ApiError ? error.message : String(error), "error");
  } finally {
    button.disabled = false;
  }
}

function showLinks({ links }) {
  const head = h("tr", {}, ["link", "moves", "bytes", "bandwidth", "transfer"].map((name, index) => h("th", { scope: "col", class: index ? "num" : null }, name)));
  const row = (link) => h("tr", { "data-key": `${link.from}>${link.to}` },
    h("th", { scope: "row" }, `${link.from} → ${link.to}`),
    [count(link.handovers), bytes(link.bytes), rate(link.bytes_per_s), ms(link.transfer_ms)].map((text) => h("td", { class: "num" }, text)));
  patch(byId("links"), [links.length
    ? h("table", {}, h("thead", {}, head), h("tbody", {}, links.map(row)))
    : h("p", { class: "empty" }, "No hand-over yet.")]);
}

function showHandovers({ handovers }) {
  patch(byId("handovers"), handovers.length
    ? handovers.slice(0, 8).map((move) => h("li", { "data-key": move.id },
        h("button", { type: "button", class: "link", "data-request": move.request_id }, `${move.from} → ${move.to}`),
        h("span", { class: "num" }, `${plural(move.blocks, "block")}, ${bytes(move.bytes)}`),
        h("span", { class: "num" }, ms(move.transfer_ms)),
        h("span", { class: "num when" }, ago(Date.now() / 1000 - ahead - move.at_unix))))
    : [h("li", { class: "empty" }, "They appear here as they happen.")]);
}

// They grow while nothing else happens.
function showAges() {
  if (latest && !document.hidden) showHandovers(latest);
}

function showCounts(state) {
  const group = (title, counts) => {
    const entries = Object.entries(counts);
    return h("div", {}, h("h4", {}, title), entries.length
      ? h("dl", { class: "numbers" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, count(value)))))
      : h("p", { class: "empty" }, "none"));
  };
  patch(byId("counts"), [group("Placed, by reason", state.placed), group("Refused, by reason", state.refused), group("On the way", state.events)]);
}

// -- wires ----------------------------------------------------------------------------------------------------------------

const wires = () => byId("wires");
const nodeOf = (name) => byId("columns").querySelector(`[data-node="${CSS.escape(name)}"]`);

function drawWires() {
  if (!latest) return;
  const box = byId("map").getBoundingClientRect();
  const stacked = getComputedStyle(byId("columns")).flexDirection === "column";
  wires().setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  const widest = Math.max(1, ...latest.links.map((link) => link.bytes));
  patch(wires(), stacked ? [] : latest.links.map((link) => {
    const path = pathOf(link.from, link.to, box);
    return path && svg("path", { "data-key": `${link.from}>${link.to}`, d: path, "stroke-width": (1 + 2.5 * Math.sqrt(link.bytes / widest)).toFixed(2) });
  }));
}

// From the right edge of one card to the left edge of the other; within a column around its right side.
function pathOf(from, to, box) {
  const source = nodeOf(from)?.getBoundingClientRect();
  const target = nodeOf(to)?.getBoundingClientRect();
  if (!source || !target) return "";
  const [x1, y1, y2] = [source.right - box.left, source.top + 18 - box.top, target.top + 18 - box.top];
  const sameColumn = Math.abs(source.left - target.left) < 2;
  const x2 = (sameColumn ? target.right : target.left) - box.left;
  const bend = sameColumn ? 22 : Math.max(16, (x2 - x1) / 2);
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${sameColumn ? x2 + bend : x2 - bend} ${y2} ${x2} ${y2}`;
}

// One hand-over on its way: a dot for those who like motion, for the others the link lights up.
function pulse(move) {
  const wire = wires().querySelector(`[data-key="${CSS.escape(`${move.from}>${move.to}`)}"]`);
  if (!wire || document.hidden || wires().querySelectorAll("circle").length > 30) return;
  if (still.matches) {
    wire.classList.add("lit");
    setTimeout(() => wire.classList.remove("lit"), 900);
    return;
  }
  const dot = svg("circle", { r: 4, "data-key": `dot ${move.id}` });
  const length = wire.getTotalLength();
  const began = performance.now() + Math.random() * 600;
  const step = (now) => {
    const part = Math.max(0, (now - began) / 700);
    if (part >= 1 || !wire.isConnected) return dot.remove();
    const { x, y } = wire.getPointAtLength(length * part);
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", y);
    if (!dot.isConnected) wires().append(dot);
    return requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}
