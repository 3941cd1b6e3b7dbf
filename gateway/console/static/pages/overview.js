// How it goes: what is so now, charts of the last minutes or hours, and what happened.

import { ApiError, call, operator } from "../frame/api.js";
import { chart, newCursor } from "../frame/chart.js";
import { h, patch, section } from "../frame/dom.js";
import { feed, on } from "../frame/feed.js";
import { ago, bytes, clock, count, ms, plural, seconds, share } from "../frame/format.js";
import { shortName } from "../frame/names.js";
import { go, href } from "../frame/router.js";

const SPANS = { "10m": ["10 min", 600, 2], "1h": ["1 hour", 3600, 5], "6h": ["6 hours", 21600, 30] }; // its words, seconds, seconds between questions
const REMEMBERED = "baton.overview-span";
const LEAST_S = 120; // shown of a gateway that has just started
const SMOOTH_S = 10;
const RATES = new Set(["ended", "good", "errors", "refused", "invalid", "generated_per_s", "prompt_tokens", "moved_bytes"]);
const LEVELS = ["bad", "warn"]; // events that are drawn into the charts
const percent = (value) => (value === null ? "–" : `${value && value < 0.1 ? (100 * value).toFixed(1) : Math.round(100 * value)} %`);
const perSecond = (value) => (value === null ? "–" : `${value < 10 ? Number(value.toFixed(1)) : count(value)}/s`);
const tokens = (value) => (value === null ? "–" : `${count(value)} tok/s`);
const moved = (value) => (value === null ? "–" : `${bytes(value)}/s`);
const whole = (value) => (value === null ? "–" : value < 10 ? String(Number(value.toFixed(1))) : count(value));
const QUANTILES = ["p50", "p95", "p99"];
const quantiles = (name) => QUANTILES.map((one, index) => ({ name: `${name}_${one}`, label: one, kind: ["prefill", "wait", "queue"][index] }));

export function mount(view, { query, signal }) {
  const state = h("div", { class: "state" });
  const tiles = h("dl", { class: "tiles" });
  const picker = h("fieldset", { class: "segments" }, h("legend", { class: "hidden" }, "Time shown"),
    Object.entries(SPANS).map(([name, [words]]) => h("label", {}, h("input", { type: "radio", name: "span", value: name }), h("span", {}, words))));
  const share = h("p", { class: "hint" });
  const charts = h("div", { class: "charts" });
  const events = h("ol", { class: "log" });
  view.append(state, tiles,
    h("div", { class: "head" }, h("h2", {}, "History"), share, picker), charts,
    section({ "aria-labelledby": "log-title" }, h("h2", { id: "log-title" }, "Events"), events));

  let span = spanOf(query);
  let shown = null; // what was fetched of the span
  let drawn = null; // {levels, charts}
  let timer = 0;
  picker.addEventListener("change", () => {
    const { value } = picker.querySelector(":checked");
    localStorage.setItem(REMEMBERED, value);
    go(href("overview", { span: value }), { replace: true });
  });

  const draw = () => {
    if (!shown) return;
    if (!drawn) {
      drawn = chartsOf(shown.levels);
      charts.replaceChildren(...drawn.map((one) => one.element));
    }
    const to = Date.now() / 1000 - ahead();
    const marks = (feed.state.log ?? []).filter((event) => LEVELS.includes(event.level)).map((event) => ({ at: event.at_unix, level: event.level }));
    const from = Math.max(to - SPANS[span][1], Math.min(shown.at[0] ?? to, to - LEAST_S));
    for (const one of drawn) one.draw({ ...shown, series: smoothed(shown), from, to, marks });
    const gateways = Object.entries(shown.gateways);
    share.textContent = gateways.length > 1 ? `of ${gateways.length} gateways` : "";
  };

  const ask = async () => {
    clearTimeout(timer);
    try {
      if (feed.live === "key" || document.hidden) throw new ApiError(401, "");
      for (const radio of picker.querySelectorAll("input")) radio.checked = radio.value === span;
      shown = joined(shown, await fetched(span, shown?.at.at(-1) ?? 0, signal));
      draw();
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) console.error(error); // the frame tells of the others
    }
    if (!signal.aborted) timer = setTimeout(ask, 1000 * (SPANS[span]?.[2] ?? 2));
  };
  signal.addEventListener("abort", () => clearTimeout(timer));

  on("*", (all) => {
    if (!all.workers || !all.latencies) return;
    patch(state, stateOf(all));
    patch(tiles, tilesOf(all));
    if (all.log) patch(events, all.log.length ? all.log.map(eventOf) : [h("li", { class: "empty" }, "Nothing happened since the gateway started.")]);
  }, { signal });
  const ages = setInterval(() => !document.hidden && feed.state.log && patch(events, feed.state.log.map(eventOf)), 5000);
  signal.addEventListener("abort", () => clearInterval(ages));
  ask();
  return {
    update({ query: next }) {
      span = spanOf(next);
      shown = null;
      ask();
    },
  };
}

// The span of the address, else the one that was chosen last.
const spanOf = (query) => [query.get("span"), localStorage.getItem(REMEMBERED)].find((one) => one in SPANS) ?? "10m";

// Seconds that this clock is ahead of the gateway's.
const ahead = () => (feed.answered && feed.state.time_unix ? feed.answered - feed.state.time_unix : 0);

const fetched = (span, since, signal) => call(`console/history?span=${span}&since=${since}`, { with: operator(), signal });

// What was shown, and what came since.
export function joined(old, news) {
  if (!old || old.span !== news.span) return news;
  const names = new Set([...Object.keys(old.series), ...Object.keys(news.series)]);
  const gap = (column, times) => column ?? Array(times.length).fill(null);
  const keep = Math.max(0, old.at.length + news.at.length - news.length);
  const series = Object.fromEntries([...names].map((name) => [name, [...gap(old.series[name], old.at), ...gap(news.series[name], news.at)].slice(keep)]));
  return { ...news, at: [...old.at, ...news.at].slice(keep), series };
}

// Rates as means of the last seconds: at two requests a second, a sample of two seconds is mostly noise.
export function smoothed({ series, step_s: step }) {
  const wide = Math.round(SMOOTH_S / step);
  if (wide < 2) return series;
  const mean = (column) => column.map((value, index) => {
    const near = column.slice(Math.max(0, index - wide + 1), index + 1).filter((one) => one !== null);
    return value === null ? null : near.reduce((all, one) => all + one, 0) / near.length;
  });
  return Object.fromEntries(Object.entries(series).map(([name, column]) => [name, RATES.has(name) ? mean(column) : column]));
}

function chartsOf(levels) {
  const cursor = newCursor();
  const slo = (value) => ({ value: 1000 * value, label: `SLO ${ms(1000 * value)}` });
  const within = `a TTFT within ${seconds(levels.ttft_s)} and a TPOT within ${ms(1000 * levels.tpot_s)}`;
  return [
    { title: "TTFT", hint: "Time to first token, from the receipt of the request", series: quantiles("ttft"), format: ms, limit: slo(levels.ttft_s) },
    { title: "TPOT", hint: "Time per output token after the first (mean of a request; also called ITL)", series: quantiles("tpot"), format: ms, limit: slo(levels.tpot_s) },
    { title: "Requests", hint: "Requests that ended, a second (mean of 10 s). Good: within both SLOs", stack: true, format: perSecond, series: [
      { name: "good", label: "good", kind: "decode", hint: `Answered with ${within}` }, { name: "late", label: "late", kind: "wait", hint: `Answered, but not with ${within}` },
      { name: "errors", label: "failed", kind: "failed", hint: "Ended with an error" },
      { name: "refused", label: "refused", kind: "queue", hint: "Turned away: too much waits, or nobody serves" }, { name: "invalid", label: "invalid", kind: "read", hint: "Wrong requests: an unknown model or field, a prompt that is too long" }] },
    { title: "Goodput", hint: "Share of requests within both SLOs", format: percent, most: 1, steps: true, series: [{ name: "goodput", label: "within SLOs", kind: "decode" }] },
    { title: "Throughput", hint: "Generated tokens of all workers, and prompt tokens that got their first token", format: tokens, series: [
      { name: "generated_per_s", label: "output", kind: "decode" }, { name: "prompt_tokens", label: "input", kind: "prefill" }] },
    { title: "Prefix cache hits", hint: "Share of prompt tokens that were cached", format: percent, most: 1, steps: true, series: [{ name: "cached", label: "of prompt tokens", kind: "frame" }] },
    { title: "KV cache in use", hint: "Blocks used or held, of all workers and of the fullest", format: percent, series: [
      { name: "kv", label: "all workers", kind: "prefill" }, { name: "kv_fullest", label: "fullest", kind: "queue" }] },
    { title: "Queue", unit: "requests", hint: "Requests in flight, and those that wait in gateways and at workers", format: whole, series: [
      { name: "in_flight", label: "in flight", kind: "prefill" }, { name: "waiting", label: "at gateways", kind: "wait" }, { name: "queued", label: "at workers", kind: "queue" }] },
    { title: "KV handed over", hint: "Bytes that prefill workers handed to decode workers", format: moved, series: [{ name: "moved_bytes", label: "KV", kind: "transfer" }] },
  ].map((one) => ({ ...one, cursor })).map((one) => derived(chart(one)));
}

// Late requests are those that ended well and not within their levels.
function derived(one) {
  const draw = (data) => {
    const { ended = [], good = [] } = data.series;
    const late = ended.map((value, index) => (value === null ? null : Math.max(0, value - (good[index] ?? 0))));
    one.draw({ ...data, series: { ...data.series, late } });
  };
  return { element: one.element, draw };
}

function stateOf({ not_ready: reason, not_ready_since: since, workers, lost = [], log = [] }) {
  const serving = workers.filter((worker) => worker.status === "ready" && !worker.differs).length;
  const all = workers.length + lost.length;
  const refusal = log.find((event) => event.kind === "refused");
  const refusing = refusal && Date.now() / 1000 - ahead() - (refusal.until_unix ?? refusal.at_unix) < 30;
  const [kind, words] = reason ? ["bad", since ? `Outage for ${ago(Date.now() / 1000 - ahead() - since).replace(" ago", "").replace("now", "a second")}` : "Outage"]
    : lost.length ? ["warn", `Serving, without ${plural(lost.length, "worker")} lost ${lost.map((one) => `${shortName(one.id)} (${clock(one.lost_unix)})`).slice(0, 3).join(", ")}`]
    : ["good", "Serving"];
  return [
    h("p", { class: `now ${kind}` }, h("span", { class: "light", "aria-hidden": "true" }), words),
    h("p", {}, h("a", { href: href("fleet") }, `${serving} of ${plural(all, "worker")} ready`)),
    refusing ? h("p", { class: "bad" }, h("a", { href: href("requests", { status: "refused" }) }, `Refusing requests since ${clock(refusal.at_unix)} (${count(refusal.count)})`)) : null,
  ];
}

const sum = (entries, name) => entries.reduce((all, entry) => all + (entry[name] ?? 0), 0);

function tilesOf({ gateways, workers, latencies, levels, waiting, in_flight: inFlight, not_ready: reason }) {
  const window = gateways[0]?.window_s ?? 0;
  const waits = Object.values(waiting);
  const blocks = sum(workers, "kv_blocks");
  const [ttftMet, ttftAll, tpotMet, tpotAll] = ["ttft_met", "ttft_count", "tpot_met", "tpot_count"].map((name) => sum(gateways, name));
  const level = (met, all) => (reason ? "stale" : !all ? "" : met / all >= 0.99 ? "good" : met / all >= 0.9 ? "warn" : "bad");
  const used = sum(workers, "kv_used") + sum(workers, "kv_held");
  const wait = sum(waits, "requests");
  const tiles = [
    ["TTFT within SLO", share(ttftMet, ttftAll), `within ${seconds(levels.ttft_s)}: ${count(ttftMet)} of ${plural(ttftAll, "request")}, last ${seconds(window)}`, ttftMet, ttftAll, level(ttftMet, ttftAll)],
    ["TPOT within SLO", share(tpotMet, tpotAll), `within ${ms(levels.tpot_s * 1000)}: ${count(tpotMet)} of ${plural(tpotAll, "reading")}, last ${seconds(window)}`, tpotMet, tpotAll, level(tpotMet, tpotAll), "Each answer is read once a second while it is written, and at its end"],
    ["TTFT p50", ms(latencies.ttft_p50_ms), `p95 ${ms(latencies.ttft_p95_ms)}, last minute`],
    ["TPOT p50", ms(latencies.tpot_p50_ms), `of ${plural(latencies.ended, "request")}, last minute`],
    ["In flight", count(inFlight), wait ? `requests; ${count(wait)} of them wait, ${plural(sum(waits, "tokens"), "token")}` : "requests; none waits"],
    ["Cache hits", share(latencies.cached_tokens, latencies.prompt_tokens), `${count(latencies.cached_tokens)} of ${plural(latencies.prompt_tokens, "prompt token")}, last minute`, latencies.cached_tokens, latencies.prompt_tokens],
    ["KV in use", share(used, blocks), `${count(used)} of ${plural(blocks, "block")}`, used, blocks],
    ["Failed", count(latencies.errors), `of ${plural(latencies.ended, "request")}, last minute`, undefined, undefined, latencies.errors ? "bad" : ""],
  ];
  return tiles.map(([name, value, note, part, all, kind, hint]) => h("div", { class: `tile ${kind ?? ""}`, "data-key": name, title: hint ?? null },
    h("dt", {}, name), h("dd", { class: "value" }, value), h("dd", { class: "hint" }, note),
    all === undefined ? null : h("dd", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${all ? (100 * part) / all : 0}%` } }))));
}

const LINKS = { worker: () => href("fleet"), role: () => href("planner"), drain: () => href("fleet"), refused: () => href("requests", { status: "refused" }) };

function eventOf(event) {
  const until = event.until_unix && event.until_unix - event.at_unix > 1 ? ` to ${clock(event.until_unix)}` : "";
  return h("li", { "data-key": String(event.id), class: event.level },
    h("span", { class: "light", "aria-hidden": "true" }),
    h("time", { class: "num" }, `${clock(event.at_unix)}${until}`),
    h("span", { class: "words" }, event.what ? h("b", { title: event.what }, shortName(event.what), " ") : null, event.kind === "refused" ? `${plural(event.count, "request")} refused: ${event.text}` : event.text,
      LINKS[event.kind] ? h("a", { href: LINKS[event.kind](), "aria-label": `Show: ${event.text}` }, "show") : null),
    h("span", { class: "num when" }, ago(Date.now() / 1000 - ahead() - (event.until_unix ?? event.at_unix))));
}
