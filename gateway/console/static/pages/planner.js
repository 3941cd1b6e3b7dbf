// What planners decide: each role's workers, load and desired number, and the decisions with their reasons.

import { call, operator } from "../frame/api.js";
import { chart, newCursor } from "../frame/chart.js";
import { h, patch } from "../frame/dom.js";
import { feed, on } from "../frame/feed.js";
import { ago, clock, count, plural } from "../frame/format.js";

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
  view.append(now, charts, h("section", { class: "panel", "aria-labelledby": "decisions-title" }, h("h2", { id: "decisions-title" }, "Decisions"),
    h("p", { class: "hint" }, "Those that differ from the one before; each gateway lists what it heard."), list));
  const cursor = newCursor();
  const drawn = [
    chart({ title: "Load", hint: "Load of a role as a share of its capacity", format: percent, cursor, series: ROLES.map((role) => ({ name: `pressure_${role}`, label: role, kind: COLOURS[role] })) }),
    ...ROLES.map((role) => chart({ title: `Workers: ${role}`, hint: "Workers that take new work of the role, and how many would be enough", format: whole, cursor, series: [
      { name: `has_${role}`, label: "there are", kind: COLOURS[role] }, { name: `desired_${role}`, label: "desired", kind: "queue" }] })),
  ];
  on("log", ({ planners, decisions, time_unix: unix }) => {
    charts.hidden = !planners.length && !decisions.length;
    if (!charts.hidden && !charts.firstChild) charts.replaceChildren(...drawn.map((one) => one.element));
    patch(now, planners.length ? planners.map((one) => card(one)) : [nobody()]);
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

const nobody = () => h("section", { class: "panel", "data-key": "nobody" }, h("h2", {}, "No planner is heard"),
  h("p", {}, "A planner moves workers between prefill and decode while they serve, and says how many of each would be enough. Start one with ", h("code", {}, "./baton up --planner"), " or ", h("code", {}, "./baton planner"), "; with ", h("code", {}, "--plan-dry-run"), " it decides and moves nobody."));

function card(one) {
  return h("section", { class: "panel", "data-key": one.planner },
    h("div", { class: "head" }, h("h2", {}, one.planner), h("span", { class: `tag ${one.acts ? "acts" : ""}` }, one.acts ? "acts" : "decides only (a dry run, or another one acts)")),
    h("p", { class: "reason" }, one.reason),
    h("div", { class: "roles" }, ROLES.map((role) => {
      const [has, desired, load] = [one.workers[role] ?? 0, one.desired[role] ?? 0, one.pressures[role] ?? 0];
      const words = desired > has ? `${plural(desired - has, "more worker")} would be enough` : desired < has ? `${plural(has - desired, "worker")} could go` : "as many as are enough";
      return h("div", { "data-key": role }, h("h3", {}, role), h("p", { class: "value" }, `${count(has)} of ${count(desired)} desired`), h("p", { class: desired > has ? "short" : "hint" }, words),
        h("p", { class: "bar-line" }, h("span", { class: "kvbar", "aria-hidden": "true" }, h("span", { class: COLOURS[role], style: { width: `${Math.min(100, 100 * load)}%` } })), h("span", { class: "num" }, `load ${percent(load)}`)));
    })),
    h("p", { class: "hint" }, `${plural(one.moves, "move")} since its start`));
}

function decision(one, unix) {
  return h("li", { "data-key": `${one.planner} ${one.at_unix}`, class: one.moved ? "moved" : "" },
    h("time", { class: "num" }, clock(one.at_unix)),
    h("span", { class: "what" }, one.moved ? "moved" : one.acts ? "stays" : "would"),
    h("span", { class: "why" }, one.reason),
    h("span", { class: "counts num" }, ROLES.map((role) => `${role} ${one.workers[role] ?? 0}/${one.desired[role] ?? 0}`).join(", ")),
    h("span", { class: "num when" }, ago(unix - one.at_unix)));
}
