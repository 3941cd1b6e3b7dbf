// What planners decide: each role's workers, load and desired number, and the decisions with their reasons.

import { call, operator } from "../frame/api.js";
import { chart, newCursor } from "../frame/chart.js";
import { h, patch, section } from "../frame/dom.js";
import { feed, on } from "../frame/feed.js";
import { ago, clock, count, plural } from "../frame/format.js";
import { shortName } from "../frame/names.js";

const EVERY_MS = 5000;
const SPAN_S = 3600;
const ROLES = ["prefill", "decode"];
const COLOURS = { prefill: "prefill", decode: "decode" };
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);
const whole = (value) => (value === null ? "–" : String(Number(value.toFixed(1))));

export function mount(view, { signal }) {
  const now = h("div", { class: "planners" });
  const charts = h("div", { class: "charts" });
  const list = h("ol", { class: "decisions" });
  view.append(now, charts, section({ "aria-labelledby": "decisions-title" }, h("h2", { id: "decisions-title" }, "Decisions"),
    h("p", { class: "hint" }, "Those that differ from the one before; each gateway lists what it heard."), list));
  const cursor = newCursor();
  const drawn = [
    chart({ title: "Load", hint: "Load of a role as a share of its capacity", format: percent, cursor, series: ROLES.map((role) => ({ name: `pressure_${role}`, label: role, kind: COLOURS[role] })) }),
    ...ROLES.map((role) => chart({ title: role === "prefill" ? "Prefill workers" : "Decode workers", hint: "Workers that take new work of the role, and how many would be enough", format: whole, cursor, series: [
      { name: `has_${role}`, label: "there are", kind: COLOURS[role] }, { name: `desired_${role}`, label: "needed", kind: "queue" }] })),
  ];
  on("log", ({ planners, decisions, time_unix: unix }) => {
    charts.hidden = !planners.length && !decisions.length;
    if (!charts.hidden && !charts.firstChild) charts.replaceChildren(...drawn.map((one) => one.element));
    patch(now, planners.length ? planners.map((one) => card(one, planners)) : [nobody()]);
    patch(list, decisions.length ? decisions.map((one) => decision(one, unix)) : [h("li", { class: "empty" }, "None yet.")]);
  }, { signal });

  let timer = 0;
  const ask = async () => {
    try {
      if (!document.hidden && feed.live !== "key") {
        const data = await call("console/history?span=1h", { with: operator(), signal });
        const to = Date.now() / 1000;
        const from = Math.max(to - SPAN_S, Math.min(data.at[0] ?? to, to - 300));
        const marks = (feed.state.decisions ?? []).filter((one) => one.moved).map((one) => ({ at: one.at_unix, level: "warn" }));
        for (const one of drawn) one.draw({ ...data, from, to, marks });
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    timer = setTimeout(ask, EVERY_MS);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  ask();
}

const nobody = () => section({ "data-key": "nobody" }, h("h2", {}, "No planner is heard"),
  h("p", {}, "A planner moves workers between prefill and decode while they serve, and says how many of each would be enough. Start one with ", h("code", {}, "./baton up --planner"), " or ", h("code", {}, "./baton planner"), "; with ", h("code", {}, "--plan-dry-run"), " it decides and moves nobody."));

const LOW = 0.5; // load of a role
const PERCENTS = /\b\d+\.\d\d\b/g;

// A planner's reason as a sentence. Pure.
export function reasonWords({ reason, pressures }) {
  if (reason === "no role is pressed") return Math.max(0, ...Object.values(pressures)) < LOW ? "Load is low: nothing to move." : "No role is short of workers: nothing to move.";
  if (reason.startsWith("both roles are pressed")) return "Both roles are short of workers: only more workers help.";
  const [, role, load, met, rest] = /^(prefill|decode) is pressed: ([\d.]+)(?: with (\d+ of \d+) in time)?(.*)$/.exec(reason) ?? [];
  if (!role) return `${reason[0]?.toUpperCase() ?? ""}${reason.slice(1)}.`;
  const more = rest.replace(/^; with (\S+) ([\d.]+), (prefill|decode) ([\d.]+) to ([\d.]+)/, (_, worker, to, giving, before, after) => `: with ${shortName(worker)} it would be ${to}, and ${giving} ${after} after ${before}`)
    .replace(/; for (\d+) of (\d+) s$/, "; a move waits until it has been so for $2 s, now $1 s");
  return `${role === "prefill" ? "Prefill" : "Decode"} is at ${load}${met ? `, with ${met} in time` : ""}${more}.`.replace(PERCENTS, (value) => percent(Number(value)));
}

// What a planner does with its decisions. Pure.
export function actsWords(one, planners) {
  if (one.acts) return "moves workers";
  const other = planners.find((each) => each.acts);
  return other ? `stands by: ${shortName(other.planner)} moves workers` : "dry run: decides, and moves no worker";
}

function card(one, planners) {
  return section({ "data-key": one.planner },
    h("div", { class: "head" }, h("h2", { title: one.planner }, shortName(one.planner)), h("span", { class: `tag ${one.acts ? "acts" : "dry"}` }, actsWords(one, planners))),
    h("p", { class: "reason" }, reasonWords(one)),
    h("div", { class: "roles" }, ROLES.map((role) => {
      const [has, desired, load] = [one.workers[role] ?? 0, one.desired[role] ?? 0, one.pressures[role] ?? 0];
      const words = desired > has ? `${plural(desired - has, "more worker")} would be enough` : desired < has ? `the load would be served by ${count(desired)}` : "just enough for the load";
      return h("div", { "data-key": role }, h("p", { class: "value" }, `${plural(has, `${role} worker`)}, ${count(desired)} needed`), h("p", { class: desired > has ? "short" : "hint" }, words),
        h("p", { class: "bar-line" }, h("span", { class: "kvbar", "aria-hidden": "true" }, h("span", { class: COLOURS[role], style: { width: `${Math.min(100, 100 * load)}%` } })), h("span", { class: "num" }, `load ${percent(load)}`)));
    })),
    h("p", { class: "hint" }, one.moves ? `${plural(one.moves, "worker")} moved since its start` : "No worker was moved since its start."));
}

function decision(one, unix) {
  return h("li", { "data-key": `${one.planner} ${one.at_unix}`, class: one.moved ? "moved" : "" },
    h("time", { class: "num" }, clock(one.at_unix)),
    h("span", { class: "what" }, one.moved ? "moved" : one.acts ? "stays" : "dry run"),
    h("span", { class: "why" }, reasonWords(one)),
    h("span", { class: "counts num" }, ROLES.map((role) => `${one.workers[role] ?? 0} ${role}, ${one.desired[role] ?? 0} needed`).join("; ")),
    h("span", { class: "num when" }, ago(unix - one.at_unix)));
}
