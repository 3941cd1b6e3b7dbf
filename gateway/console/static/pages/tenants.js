// Who uses how much: work, what it costs in seconds of devices, and budgets.

import { byId, h, patch } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { count, plural, seconds, share } from "../frame/format.js";

const BUDGETS = { requests: "requests a minute", tokens: "tokens a minute", concurrent: "at a time" };

export function mount(view, { signal }) {
  view.append(byId("old-tenants").content.cloneNode(true));
  on("figures", ({ tenants }) => showTenants(tenants), { signal });
}

function showTenants(tenants) {
  const cost = (one) => (one.prefill_s ?? 0) + (one.decode_s ?? 0);
  const all = tenants.reduce((sum, one) => sum + cost(one), 0);
  patch(byId("tenant-list"), tenants.map((one) => h("li", { "data-key": one.tenant },
    h("h3", {}, one.tenant),
    meter("costs", `${seconds(cost(one))} of devices, ${share(cost(one), all)} of all`, cost(one), all),
    h("p", { class: "hint" }, `${seconds(one.prefill_s ?? 0)} prefill, ${seconds(one.decode_s ?? 0)} decode`),
    h("p", { class: "hint" }, `${plural(one.requests ?? 0, "request")}, ${count(one.prompt_tokens ?? 0)} tok in`, one.cached_tokens ? ` (${share(one.cached_tokens, one.prompt_tokens)} cached)` : "", `, ${count(one.completion_tokens ?? 0)} out`),
    Object.entries(one.budgets).map(([name, { used, limit }]) => meter(used >= 0.9 * limit ? "full" : "", `${count(Math.max(0, used))} of ${count(limit)} ${BUDGETS[name] ?? name}`, used, limit)))));
}

const meter = (kind, text, part, whole) => h("div", { class: `budget ${kind}` },
  h("span", {}, text),
  h("span", { class: "kvbar", "aria-hidden": "true" }, h("span", { class: "used", style: { width: `${whole ? Math.min(100, Math.max(0, (100 * part) / whole)) : 0}%` } })));
