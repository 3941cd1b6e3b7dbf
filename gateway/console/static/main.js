// The console: one stream of what the gateways do, as long as somebody looks, and what it shows.

import { ApiError, key, setKeys, watch } from "./api.js";
import { startChat } from "./chat.js";
import { byId, h, patch, toast } from "./dom.js";
import { showAges, showFleet, startFleet } from "./fleet.js";
import { count, ms, plural, seconds, share } from "./format.js";
import { showRequests, startRequests } from "./requests.js";
import { showTenants } from "./tenants.js";

const AGAIN_MS = 1000;
const THEMES = ["system", "light", "dark"];
const state = {}; // the newest of each part
let live = new AbortController();
let goOn = () => {};
let answeredAt = "";
let before = null; // the totals of the picture before, for rates

async function follow() {
  for (;;) {
    while (document.hidden) await pause(60_000);
    live = new AbortController();
    let next = 200; // the gateway ends a stream now and then
    try {
      for await (const news of watch(live.signal)) take(news);
    } catch (error) {
      if (error instanceof ApiError) complain(error);
      else if (!live.signal.aborted) console.error(error);
      next = live.signal.aborted ? 0 : error.status === 401 ? 5 * AGAIN_MS : AGAIN_MS;
    }
    document.body.classList.add("loaded");
    await pause(next);
  }
}

// Until so many milliseconds have passed, or somebody wants a new stream.
function pause(milliseconds) {
  return new Promise((resolve) => {
    goOn = resolve;
    setTimeout(resolve, milliseconds);
  });
}

function restart() {
  live.abort();
  goOn();
}

function take({ name, at, value }) {
  if (name === "requests") state.requests = value;
  else Object.assign(state, value, name === "fleet" ? { time_unix: at } : {});
  if (!state.workers || !state.latencies) return;
  if (name === "fleet") {
    addRates(state);
    showFleet(state);
    showWhere(state);
  }
  if (name !== "requests") showTiles(state);
  if (name === "figures") showTenants(state.tenants);
  if (state.requests) showRequests(state.requests, state.gateways.length);
  answeredAt = new Date().toLocaleTimeString();
  banner(state.not_ready ? `No request is served now: ${state.not_ready}.` : "");
  document.body.classList.add("loaded");
}

function complain(error) {
  if (error.status === 401) banner(`To show the fleet and the requests ${error.message.replace(/: send.*/, "")}.`, true);
  else banner(`${error.message[0].toUpperCase()}${error.message.slice(1)}.${answeredAt ? ` What you see is of ${answeredAt}.` : ""}`);
}

function banner(text, wantsKey = false) {
  if (byId("banner-text").textContent !== text) byId("banner-text").textContent = text;
  byId("banner").hidden = !text;
  byId("banner-keys").hidden = !wantsKey;
  byId("main").classList.toggle("stale", Boolean(text) && !wantsKey && text.includes("What you see"));
}

function showWhere(state) {
  byId("where").textContent = `${state.model} · ${state.gateway} · ${state.version}`;
  document.title = `${state.not_ready ? "Not ready · " : ""}Baton console`;
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

const sum = (entries, name) => entries.reduce((all, entry) => all + (entry[name] ?? 0), 0);

function showTiles(state) {
  const { gateways, workers, latencies, levels } = state;
  const window = gateways[0]?.window_s ?? 0;
  const waiting = Object.values(state.waiting);
  const blocks = sum(workers, "kv_blocks");
  const [ttftMet, ttftAll, tpotMet, tpotAll] = ["ttft_met", "ttft_count", "tpot_met", "tpot_count"].map((name) => sum(gateways, name));
  const level = (met, all) => (!all ? "" : met / all >= 0.99 ? "good" : met / all >= 0.9 ? "warn" : "bad");
  const tiles = [
    ["First tokens in time", share(ttftMet, ttftAll), `of ${count(ttftAll)} in ${seconds(window)}, ≤ ${seconds(levels.ttft_s)}`, ttftMet, ttftAll, level(ttftMet, ttftAll)],
    ["Streams at pace", share(tpotMet, tpotAll), `of ${plural(tpotAll, "sample")}, ≤ ${ms(levels.tpot_s * 1000)} a token`, tpotMet, tpotAll, level(tpotMet, tpotAll)],
    ["First token", ms(latencies.ttft_p50_ms), `95 % within ${ms(latencies.ttft_p95_ms)}`],
    ["Per token", ms(latencies.tpot_p50_ms), `median of ${count(latencies.ended)} ended in a minute`],
    ["In flight", count(state.in_flight), `${count(sum(waiting, "requests"))} waiting, ${count(sum(waiting, "tokens"))} tok`],
    ["Generating", `${count(sum(workers, "tokens_per_s"))} tok/s`, `${plural(sum(workers, "running"), "sequence")} on ${plural(workers.length, "worker")}`],
    ["Prompts cached", share(latencies.cached_tokens, latencies.prompt_tokens), `of ${count(latencies.prompt_tokens)} tok in a minute`, latencies.cached_tokens, latencies.prompt_tokens],
    ["KV in use", share(sum(workers, "kv_used") + sum(workers, "kv_held"), blocks), `${count(sum(workers, "kv_held"))} of ${plural(blocks, "block")} held`, sum(workers, "kv_used") + sum(workers, "kv_held"), blocks],
  ];
  patch(byId("tiles"), tiles.map(([name, value, note, part, whole, kind]) => h("div", { class: `tile ${kind ?? ""}`, "data-key": name },
    h("dt", {}, name), h("dd", { class: "value" }, value), h("dd", { class: "hint" }, note),
    whole === undefined ? null : h("dd", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${whole ? (100 * part) / whole : 0}%` } })))));
}

// -- keys, theme ------------------------------------------------------------------------------------------------------------

function openKeys() {
  byId("api-key").value = key("api");
  byId("admin-key").value = key("admin");
  byId("keys").showModal();
}

function startKeys() {
  for (const id of ["open-keys", "banner-keys"]) byId(id).addEventListener("click", openKeys);
  byId("keys-cancel").addEventListener("click", () => byId("keys").close());
  byId("keys-form").addEventListener("submit", () => {
    setKeys({ api: byId("api-key").value.trim(), admin: byId("admin-key").value.trim() });
    restart();
  });
  byId("forget").addEventListener("click", () => {
    setKeys({});
    byId("keys").close();
    toast("The keys are forgotten.");
    restart();
  });
  byId("keys").addEventListener("close", () => (byId("api-key").value = byId("admin-key").value = ""));
}

function startTheme() {
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = `Theme: ${theme}`;
  };
  apply(THEMES.includes(localStorage.getItem("baton.theme")) ? localStorage.getItem("baton.theme") : "system");
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("baton.theme", next);
    apply(next);
  });
}

startTheme();
startKeys();
startChat();
startFleet({ openKeys });
startRequests();
setInterval(showAges, 1000);
document.addEventListener("visibilitychange", restart);
follow();
