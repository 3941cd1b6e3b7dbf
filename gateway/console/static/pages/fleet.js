// The fleet: workers as a table or a heat map, links between them, one worker with its orders.

import { ApiError, key, setDraining, setRoles } from "../frame/api.js";
import { confirmed, h, pairs, patch, scroll, section, toast } from "../frame/dom.js";
import { feed, on } from "../frame/feed.js";
import { ago, bytes, clock, count, length, ms, plural, rate, share } from "../frame/format.js";
import { openKeys } from "../frame/keys.js";
import { distinct, partsOf, rolesOf, shortName } from "../frame/names.js";
import { go, href } from "../frame/router.js";

const MANY = 16; // workers, beyond which the heat map is shown first
const MANY_LINKS = 12; // links, beyond which they are a matrix
const CHOICES = { Prefill: ["prefill"], Decode: ["decode"], Both: ["prefill", "decode"] };
const held = (worker) => worker.kv_used + worker.kv_held;

// What a heat map may show: its words, the share of full (0 to 1), and the text in a cell.
const HEATS = {
  kv: ["KV cache", (worker) => held(worker) / Math.max(1, worker.kv_blocks), (worker) => share(held(worker), worker.kv_blocks)],
  batch: ["Batch", (worker) => worker.running / Math.max(1, worker.max_sequences), (worker) => `${worker.running}/${worker.max_sequences}`],
  queue: ["Queue", (worker, most) => worker.queued_tokens / Math.max(1, most("queued_tokens")), (worker) => `${count(worker.queued_tokens)} tok`],
  rate: ["Tokens", (worker, most) => (worker.tokens_per_s ?? 0) / Math.max(1, most("tokens_per_s")), (worker) => `${count(worker.tokens_per_s ?? 0)}/s`],
  step: ["Step time", (worker, most) => worker.decode_step_ms / Math.max(1e-9, most("decode_step_ms")), (worker) => (worker.decode_step_ms ? ms(worker.decode_step_ms) : "–")],
};

// Words, name in the address, what it is sorted by, what it is.
const COLUMNS = [
  ["worker", "id", (worker) => worker.id, "Its name; the whole one is on its page"],
  ["host", "host", (worker) => partsOf(worker.id).host, "The machine it runs on, as its name says"],
  ["status", "status", statusOf, "Whether it takes new work"],
  ["roles", "roles", (worker) => [...worker.roles].sort().join(" + "), "Which work it takes: prompts (prefill), answers (decode), vectors (pool)"],
  ["KV cache", "kv", (worker) => held(worker) / Math.max(1, worker.kv_blocks), "Share of its KV blocks that are used, or held for a handoff"],
  ["batch", "batch", (worker) => worker.running / Math.max(1, worker.max_sequences), "Requests that are computed together, of the most it takes"],
  ["waiting", "waiting", (worker) => worker.waiting, "Requests that it has and does not compute yet"],
  ["to prefill", "queue", (worker) => worker.queued_tokens, "Prompt tokens that it has claimed and not computed yet"],
  ["output", "rate", (worker) => worker.tokens_per_s ?? 0, "Tokens that it generates, or pools"],
  ["busy", "busy", (worker) => worker.busy ?? 0, "Share of the time in which its device computed"],
  ["step", "step", (worker) => worker.decode_step_ms, "Time of one decode step: the next token of every request of the batch"],
  ["prefill rate", "prefill", (worker) => worker.prefill_tokens_per_s, "Prompt tokens a second while it prefills"],
  ["slowest link", "link", (worker) => worker.link_bytes_per_s, "Bandwidth of its slowest link to a decode worker, measured when links were opened"],
  ["up", "up", (worker) => -(worker.started_unix ?? 0), "Time since it started"],
];
const FIRST_NUMBER = 6; // column

let before = null; // the totals of the picture before, for rates

export function mount(view, { path, query, signal }) {
  const parts = h("div", { class: "fleet" });
  view.append(parts);
  let address = { path, query };
  const draw = () => {
    const { state } = feed;
    if (!state.workers) return;
    patch(parts, address.path.length ? one(state, address.path[0]) : all(state, address.query));
  };
  parts.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.dataset.worker) operate(button);
    if (button?.dataset.set) {
      const [name, value] = button.dataset.set.split("=");
      go(href("fleet", { ...Object.fromEntries(address.query), [name]: value }), { replace: true });
    }
    if (button?.dataset.keys) openKeys("admin");
  });
  on("fleet", (state) => {
    addRates(state);
    draw();
  }, { signal });
  on("log", draw, { signal });
  return { update(next) { address = next; draw(); } };
}

const pools = (worker) => worker.roles.includes("pool");
const madeOf = (worker) => worker.generated_tokens + (worker.pooled_tokens ?? 0);

// Generated or pooled tokens a second of each worker and its device's busy share, from its totals of two states.
function addRates(state) {
  const passed = before ? state.time_unix - before.time_unix : 0;
  const known = new Map((before?.workers ?? []).map((worker) => [worker.id, worker]));
  for (const worker of state.workers) {
    const old = known.get(worker.id);
    const same = old?.incarnation === worker.incarnation;
    if (passed > 0.8 && same) {
      worker.tokens_per_s = Math.max(0, madeOf(worker) - madeOf(old)) / passed;
      worker.busy = Math.min(1, Math.max(0, worker.pass_s - old.pass_s) / passed);
    } else [worker.tokens_per_s, worker.busy] = same ? [old.tokens_per_s, old.busy] : [];
  }
  if (!before || passed > 0.8) before = { time_unix: state.time_unix, workers: state.workers };
}

function statusOf(worker) {
  if (worker.lost_unix) return "lost";
  if (worker.is_contested) return "two of a name";
  const busy = worker.running + worker.waiting + worker.queued_tokens + worker.kv_held;
  if (worker.status === "draining" && !busy) return "drained";
  return worker.differs ? "gets no work" : worker.status;
}

const kindOf = (worker) => ({ ready: "good", draining: "warn", starting: "warn", drained: "warn", lost: "lost" })[statusOf(worker)] ?? "bad";

// -- all --

function all(state, query) {
  const lost = (state.lost ?? []).filter((one) => !state.workers.some((worker) => worker.id === one.id));
  const workers = [...state.workers, ...lost];
  const shown = query.get("view") || (workers.length > MANY ? "map" : "table");
  const roles = [["prefill"], ["decode"], ["decode", "prefill"], ["pool"]].map((one) => state.workers.filter((worker) => [...worker.roles].sort().join() === one.join()).length);
  const counts = [`${plural(state.workers.length, "worker")}: ${roles[0]} prefill, ${roles[1]} decode${roles[2] ? `, ${roles[2]} both` : ""}${roles[3] ? `, ${roles[3]} pool` : ""}`, lost.length ? `${lost.length} lost` : ""].filter(Boolean).join(" · ");
  return [
    section({ "data-key": "workers", "aria-labelledby": "workers-title" },
      h("div", { class: "head" }, h("h2", { id: "workers-title" }, "Workers"), h("p", { class: "hint" }, counts), segments("view", { table: "Table", map: "Heat map" }, shown)),
      !workers.length ? h("p", { class: "empty" }, "No worker is heard. Start one: ./baton up, ./baton prefill, ./baton decode, ./baton pool.")
        : shown === "map" ? heatMap(workers, query) : table(workers, query)),
    section({ "data-key": "gateways", "aria-labelledby": "gateways-title" }, h("h2", { id: "gateways-title" }, "Gateways"), gatewayTable(state)),
    section({ "data-key": "links", "aria-labelledby": "links-title" }, h("h2", { id: "links-title" }, "KV links, last minute"), linksOf(state)),
    h("details", { class: "panel counts", "data-key": "counts" }, h("summary", {}, "Placements, refusals and other counts since the gateways started"), countsOf(state)),
  ];
}

const segments = (name, choices, chosen) => h("div", { class: "segments", role: "group" }, Object.entries(choices).map(([value, words]) =>
  h("button", { type: "button", "data-set": `${name}=${value}`, "aria-pressed": String(value === chosen) }, words)));

const kv = (worker) => h("span", { class: "bar-cell", title: `${count(worker.kv_used)} used and ${count(worker.kv_held)} held of ${plural(worker.kv_blocks, "block")} of ${worker.block_tokens} tokens, ${bytes(worker.block_bytes)} each` },
  gauge([[worker.kv_used, "used"], [worker.kv_held, "held"]], worker.kv_blocks), h("span", { class: "num" }, share(held(worker), worker.kv_blocks)));

const gauge = (parts, whole) => h("span", { class: "kvbar", "aria-hidden": "true" }, parts.map(([value, kind]) => h("span", { class: kind, style: { width: `${(100 * value) / Math.max(1, whole)}%` } })));

function table(workers, query) {
  const [sorted, down] = (query.get("sort") ?? "id").split(".");
  const [, , by] = COLUMNS.find(([, name]) => name === sorted) ?? COLUMNS[0];
  const order = [...workers].sort((a, b) => Number(Boolean(a.lost_unix)) - Number(Boolean(b.lost_unix)) || (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : a.id < b.id ? -1 : 1) * (down ? -1 : 1));
  const names = distinct(workers.map((worker) => worker.id));
  const head = COLUMNS.map(([words, name, , hint], index) => h("th", { scope: "col", class: index >= FIRST_NUMBER ? "num" : null, title: hint, "aria-sort": name === sorted ? (down ? "descending" : "ascending") : null },
    h("button", { type: "button", class: "sort", "data-set": `sort=${name}${name === sorted ? (down ? "" : ".down") : index > 3 ? ".down" : ""}` }, words, name === sorted ? (down ? " ↓" : " ↑") : "")));
  return scroll("Workers", h("table", { class: "workers" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, order.map((worker) => line(worker, names.get(worker.id))))));
}

// Work again for a worker that was drained, where the order can be given.
const undo = (worker) => (worker.status === "draining" && !worker.lost_unix && key("admin")
  ? h("button", { type: "button", class: "link", "data-worker": worker.id, "data-drain": "false", "aria-label": `Let ${worker.id} take work again` }, "undo") : null);

function line(worker, { short, host }) {
  const number = (text) => h("td", { class: "num" }, text);
  const text = worker.lost_unix ? `lost ${clock(worker.lost_unix)}` : statusOf(worker);
  return h("tr", { "data-key": worker.id, "data-node": worker.id, class: kindOf(worker) },
    h("th", { scope: "row" }, h("a", { href: href("fleet", worker.id), title: worker.id }, short), worker.ranks > 1 ? h("span", { class: "hint", title: `${worker.ranks} ranks share its model` }, ` ×${worker.ranks}`) : null),
    h("td", { class: "host" }, host || "–"),
    h("td", { class: "status", title: worker.differs ?? "" }, h("span", { class: "light", "aria-hidden": "true" }), text, undo(worker)),
    h("td", {}, rolesOf(worker, " + ")),
    h("td", {}, pools(worker) ? "–" : kv(worker)),
    h("td", {}, pools(worker) ? h("span", { class: "num" }, count(worker.running)) : h("span", { class: "bar-cell" }, gauge([[worker.running, "batch"]], worker.max_sequences), h("span", { class: "num" }, batchOf(worker)))),
    number(count(worker.waiting)),
    number(worker.queued_tokens ? `${count(worker.queued_tokens)} tok` : "0"),
    number(worker.tokens_per_s === undefined ? "–" : `${count(worker.tokens_per_s)} tok/s`),
    number(worker.busy === undefined ? "–" : `${Math.round(100 * worker.busy)} %`),
    number(worker.decode_step_ms ? ms(worker.decode_step_ms) : "–"),
    number(worker.prefill_tokens_per_s ? `${count(worker.prefill_tokens_per_s)} tok/s` : "–"),
    number(rate(worker.link_bytes_per_s)),
    number(age(worker)));
}

const batchOf = (worker) => (pools(worker) ? plural(worker.running, "text") : `${count(worker.running)}/${count(worker.max_sequences)}`);

const age = ({ started_unix: started, lost_unix: lost }) => (started && !lost ? length(Date.now() / 1000 - started) : "–");

function heatMap(workers, query) {
  const name = query.get("heat") in HEATS ? query.get("heat") : "kv";
  const [words, heat, text] = HEATS[name];
  const most = (field) => Math.max(0, ...workers.map((worker) => worker[field] ?? 0));
  const groups = [["Prefill", "prefill"], ["Decode", "decode"], ["Both", "decode,prefill"], ["Pool", "pool"]].map(([title, roles]) => [title, workers.filter((worker) => [...worker.roles].sort().join() === roles)]);
  const names = distinct(workers.map((worker) => worker.id));
  const hosts = new Set([...names.values()].map(({ host }) => host));
  const nameOf = ({ id }) => [names.get(id).short, hosts.size > 1 ? names.get(id).host : ""].filter(Boolean).join(" ");
  const cell = (worker) => {
    const part = worker.lost_unix ? 0 : Math.max(0, Math.min(1, heat(worker, most)));
    return h("a", { href: href("fleet", worker.id), class: `cell ${kindOf(worker)}`, "data-key": worker.id, "data-node": worker.id, style: { "--heat": `${Math.round(100 * part)}%` },
      title: `${worker.id}: ${statusOf(worker)}, ${pools(worker) ? "" : `KV ${share(held(worker), worker.kv_blocks)}, `}batch ${batchOf(worker)}, ${count(worker.queued_tokens)} tok to ${pools(worker) ? "pool" : "prefill"}` },
    h("span", { class: "cell-name" }, nameOf(worker)), h("span", { class: "cell-value" }, worker.lost_unix ? "lost" : statusOf(worker) === "ready" ? text(worker) : statusOf(worker)));
  };
  return h("div", { class: "heat" }, h("div", { class: "row" }, segments("heat", Object.fromEntries(Object.entries(HEATS).map(([one, [title]]) => [one, title])), name),
    h("span", { class: "ramp", "aria-hidden": "true" }, "low", h("i", {}), "high"), h("span", { class: "hidden" }, `Coloured by ${words}`)),
  groups.filter(([, members]) => members.length).map(([title, members]) => h("div", { "data-key": title }, h("h3", {}, `${title} (${members.length})`), h("div", { class: "cells" }, members.sort((a, b) => (a.id < b.id ? -1 : 1)).map(cell)))));
}

// How many characters all names begin with, up to a word's end.
function prefixOf(names) {
  if (names.length < 2) return 0;
  let length = 0;
  while (length < names[0].length && names.every((name) => name[length] === names[0][length])) length++;
  return names[0].lastIndexOf("-", length - 1) + 1;
}

function gatewayTable(state) {
  const head = [["gateway", ""], ["in flight", "Requests of its clients"], ["queued", "Requests that wait for their turn"], ["waiting", "Prompt tokens of these"], ["handing over", "Requests between prefill and decode"],
    ["TTFT in SLO", "Share of requests whose first token was in time, last 30 s"], ["TPOT in SLO", "Share of readings of answers whose tokens were in time, last 30 s"]];
  return scroll("Gateways", h("table", {}, h("thead", {}, h("tr", {}, head.map(([name, hint], index) => h("th", { scope: "col", class: index ? "num" : null, title: hint || null }, name)))),
    h("tbody", {}, state.gateways.map((one) => h("tr", { "data-key": one.id }, h("th", { scope: "row", title: one.id }, shortName(one.id), one.id === state.gateway ? h("span", { class: "hint" }, " this one") : null),
      [count(one.in_flight), count(one.queued_requests), `${count(one.waiting_tokens)} tok`, count(one.handing_over), share(one.ttft_met, one.ttft_count), share(one.tpot_met, one.tpot_count)].map((text) => h("td", { class: "num" }, text)))))));
}

function linksOf(state, only = null) {
  const links = state.links.filter((link) => !only || link.from === only || link.to === only);
  if (!links.length) return h("p", { class: "empty" }, "No handoff in the last minute.");
  if (!only && links.length > MANY_LINKS) return matrix(links);
  const transports = Object.fromEntries([...(state.lost ?? []), ...state.workers].map((worker) => [worker.id, worker.transport]));
  const head = ["link", "transport", "handoffs", "failures", "bytes", "bandwidth", "transfer p50"];
  return scroll("Links", h("table", { class: "links" }, h("thead", {}, h("tr", {}, head.map((name, index) => h("th", { scope: "col", class: index > 1 ? "num" : null }, name)))),
    h("tbody", {}, links.map((link) => h("tr", { "data-key": `${link.from}>${link.to}` }, h("th", { scope: "row", title: `${link.from} → ${link.to}` }, `${shortName(link.from)} → ${shortName(link.to)}`), h("td", {}, transports[link.to] ?? "–"),
      h("td", { class: "num" }, count(link.handovers)), h("td", { class: `num ${link.failures ? "bad" : ""}` }, count(link.failures ?? 0)),
      [bytes(link.bytes), rate(link.bytes_per_s), ms(link.transfer_ms)].map((text) => h("td", { class: "num" }, text)))))));
}

// Prefill workers down, decode workers across; a cell's colour is its share of the bytes.
function matrix(links) {
  const [from, to] = ["from", "to"].map((end) => [...new Set(links.map((link) => link[end]))].sort());
  const cut = { from: prefixOf(from), to: prefixOf(to) };
  const most = Math.max(1, ...links.map((link) => link.bytes));
  const known = new Map(links.map((link) => [`${link.from}>${link.to}`, link]));
  const cell = (a, b) => {
    const link = known.get(`${a}>${b}`);
    if (!link) return h("td", {});
    const told = `${a} → ${b}: ${plural(link.handovers, "handoff")}, ${bytes(link.bytes)}, ${rate(link.bytes_per_s)}, p50 ${ms(link.transfer_ms)}, ${plural(link.failures ?? 0, "failure")}`;
    return h("td", { class: `cell ${link.failures ? "bad" : ""}`, title: told, style: { "--heat": `${Math.round((100 * link.bytes) / most)}%` } }, link.bytes_per_s ? bytes(link.bytes_per_s).replace(" ", "\u2009") : "·");
  };
  return h("div", {}, h("p", { class: "hint" }, "Bandwidth, a second; the darker, the more bytes moved. Rows hand over to columns."), scroll("Links",
    h("table", { class: "matrix" }, h("thead", {}, h("tr", {}, h("td", {}), to.map((name) => h("th", { scope: "col", title: name }, name.slice(cut.to) || name)))),
      h("tbody", {}, from.map((a) => h("tr", { "data-key": a }, h("th", { scope: "row", title: a }, a.slice(cut.from) || a), to.map((b) => cell(a, b))))))));
}

function countsOf(state) {
  const group = (title, counts) => {
    const entries = Object.entries(counts ?? {});
    return h("div", {}, h("h3", {}, title), entries.length
      ? pairs("numbers", entries.map(([name, value]) => [name.replaceAll("_", " "), count(value)]))
      : h("p", { class: "empty" }, "none"));
  };
  return h("div", { class: "halves" }, group("Placed, by reason", state.placed), group("Refused, by reason", state.refused), group("Events", state.events));
}

// -- one worker --

function one(state, id) {
  const worker = state.workers.find((each) => each.id === id) ?? (state.lost ?? []).find((each) => each.id === id);
  const back = h("nav", { class: "crumbs", "data-key": "back", "aria-label": "Fleet" }, h("a", { href: href("fleet") }, "← Fleet"));
  if (!worker) return [back, h("p", { class: "panel empty", "data-key": "none" }, `No worker ${id} is heard.`)];
  const { short, host } = partsOf(id);
  const facts = [
    ["host", host || "–"], ["up", age(worker)], ["roles", rolesOf(worker, " and ")], ["model", worker.model], ["context", `${count(worker.max_model_len)} tok`], ["transport", worker.transport],
    ...(worker.ranks > 1 ? [["ranks", count(worker.ranks)]] : []),
    ["batch", batchOf(worker)], ["waiting", count(worker.waiting)], [pools(worker) ? "to pool" : "to prefill", `${count(worker.queued_tokens)} tok`],
    ["output", worker.tokens_per_s === undefined ? "–" : `${count(worker.tokens_per_s)} tok/s`], [pools(worker) ? "pooled" : "generated", `${count(madeOf(worker))} tok`], ["device busy", worker.busy === undefined ? "–" : `${Math.round(100 * worker.busy)} %`],
    ["step", worker.decode_step_ms ? ms(worker.decode_step_ms) : "–"], ["prefill rate", worker.prefill_tokens_per_s ? `${count(worker.prefill_tokens_per_s)} tok/s` : "–"],
    ...(worker.drafted_tokens ? [["drafts from", worker.drafter || "–"], ["drafts accepted", share(worker.accepted_tokens, worker.drafted_tokens)], ["a draft's step", `${(1 + worker.accepted_tokens / worker.drafts).toFixed(2)} tok`]] : []),
    ...(pools(worker) ? [] : [["slowest link", rate(worker.link_bytes_per_s)], ["KV used, held", `${count(worker.kv_used)}, ${count(worker.kv_held)} of ${count(worker.kv_blocks)}`],
      ["block", `${worker.block_tokens} tok, ${bytes(worker.block_bytes)}`], ["KV memory", bytes(worker.kv_blocks * worker.block_bytes)]]),
    ...Object.entries(worker.tiers ?? {}).flatMap(([name, tier]) => [[`${name} tier`, `${bytes(tier.used_bytes)} of ${bytes(tier.bytes)}`], [`found on ${name}`, `${count(tier.hit_tokens)} tok`],
      ...(tier.failed ? [[`${name} misses by faults`, count(tier.failed)]] : [])]),
    ["name", id], ["incarnation", worker.incarnation],
  ];
  const told = worker.lost_unix ? `lost ${clock(worker.lost_unix)}, as it was last heard` : worker.differs ? `gets no work: ${worker.differs}` : statusOf(worker);
  const events = (state.log ?? []).filter((event) => event.what === id).slice(0, 8);
  return [back,
    h("section", { class: `panel worker ${kindOf(worker)}`, "data-key": `w:${id}`, "data-node": id },
      h("div", { class: "head" }, h("h2", {}, h("span", { class: "light", "aria-hidden": "true" }), short, h("span", { class: "tag" }, told)), h("a", { class: "button", href: href("requests", { worker: id }) }, "Its requests")),
      pools(worker) ? null : [h("p", { class: "hint" }, "KV cache in use"), kv(worker)], pairs("numbers", facts),
      worker.lost_unix ? null : orders(worker, state)),
    pools(worker) ? null : section({ "data-key": "links" }, h("h2", {}, "Its links, last minute"), linksOf(state, id)),
    events.length ? section({ "data-key": "events" }, h("h2", {}, "Its events"), h("ul", { class: "told" }, events.map((event) => h("li", { "data-key": String(event.id) }, `${clock(event.at_unix)}  ${event.text}`, h("span", { class: "hint" }, ` ${ago(state.time_unix - event.at_unix)}`))))) : null,
  ];
}

function orders(worker, state) {
  if (!key("admin")) {
    return h("p", { class: "controls" }, state.has_admin ? h("button", { type: "button", "data-keys": "1" }, "Manage this worker")
      : h("span", { class: "hint" }, "To move or drain workers here, start the gateway with an admin key (--admin-key, or by baton up)."), state.has_admin ? h("span", { class: "hint" }, "needs the admin key: of `baton up`, .baton/users/admin.key") : null);
  }
  const now = [...worker.roles].sort().join();
  const draining = worker.status === "draining";
  const acts = (state.planners ?? []).some((planner) => planner.acts);
  const choices = pools(worker) ? [] : Object.entries(CHOICES).map(([name, roles]) =>
    h("button", { type: "button", "data-worker": worker.id, "data-roles": roles.join(), "aria-pressed": String([...roles].sort().join() === now), disabled: draining }, name));
  return h("div", { class: "controls", role: "group", "aria-label": `Manage ${worker.id}` },
    choices.length ? h("span", { class: "segments" }, choices) : null,
    h("button", { type: "button", "data-worker": worker.id, "data-drain": String(!draining) }, draining ? "Undo the drain" : "Drain"),
    acts && choices.length ? h("span", { class: "hint" }, "A planner is at work and may move it back.") : null);
}

async function operate(button) {
  const { worker, roles, drain } = button.dataset;
  if (button.getAttribute("aria-pressed") === "true") return;
  const wanted = roles?.split(",") ?? [];
  const { workers } = feed.state;
  const left = workers.filter((other) => other.id !== worker && other.status === "ready");
  const lost = workers.find((one) => one.id === worker).roles.filter((role) => !wanted.includes(role));
  const last = lost.filter((role) => !left.some((other) => other.roles.includes(role)));
  const warning = last.length ? ` Nobody else takes ${last.join(" or ")}: ${last.includes("decode") ? "no request is served until somebody does" : last.includes("pool") ? "nothing is embedded or scored until somebody does" : "prompts are computed by decode workers until somebody does"}.` : "";
  if (drain === "true" && !(await confirmed(`Drain ${worker}?`, `It takes no new work; what it has begun goes on to its end.${warning}`, "Drain"))) return;
  if (roles && !(await confirmed(`Make ${worker} ${wanted.join(" and ")}?`, `What it has begun goes on to its end.${warning}`, "Switch"))) return;
  button.disabled = true;
  try {
    if (roles) await setRoles(worker, wanted);
    else await setDraining(worker, drain === "true");
    toast(roles ? `${worker} takes ${wanted.join(" and ")} now.` : drain === "true" ? `${worker} drains.` : `${worker} takes work again.`);
  } catch (error) {
    toast(error instanceof ApiError ? error.message : String(error), "error");
  } finally {
    button.disabled = false;
  }
}
