// Keys and tenants: what each key used over time, and making, revoking and limiting, which needs the admin key.

import { call, key, onKeys } from "../frame/api.js";
import { button as quiet, confirmed, h, opened, quietly, section, toast } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { count, plural, seconds, share } from "../frame/format.js";
import { unread } from "../frame/keys.js";
import { fill, table } from "../frame/table.js";

const SPANS = [[24, "24 hours"], [168, "7 days"], [744, "31 days"]];
const MEASURES = [["completion_tokens", "tokens out"], ["prompt_tokens", "tokens in"], ["requests", "requests"]];
const COLOURS = ["prefill", "decode", "wait", "transfer", "queue", "frame"];
const AGAIN_MS = 15_000;
const BUDGETS = { requests: "requests a minute", tokens: "tokens a minute", concurrent: "at a time" };
const LIMITS = [
  ["weight", "Weight: its share of the work beside others that wait", 1, { min: 0.001, max: 1000, step: "any" }],
  ["requests_per_minute", "Requests a minute, 0: no limit", 0, { min: 0, step: 1 }],
  ["tokens_per_minute", "Tokens a minute, 0: no limit", 0, { min: 0, step: 1 }],
  ["max_concurrent", "Requests at a time, 0: no limit", 0, { min: 0, max: 10_000, step: 1 }],
  ["queue_share", "Share of the waiting queue that it may fill", 0.5, { min: 0.001, max: 1, step: "any" }],
  ["kv_share", "Share of a KV pool that its cached blocks may fill while others need room", 1, { min: 0.001, max: 1, step: "any" }],
  ["max_priority", "Highest priority that its clients may ask for", 0, { min: -100, max: 100, step: 1 }],
];

const GOALS = [
  ["ttft_slo_ms", "Goal of a first token, ms; empty: the gateway's", { min: 0.001, max: 3_600_000, step: "any" }],
  ["ttft_slo_ms_per_token", "so much later for each prompt token, ms", { min: 0, max: 3_600_000, step: "any" }],
  ["tpot_slo_ms", "Goal of a further token, ms; empty: the gateway's", { min: 0.001, max: 3_600_000, step: "any" }],
];

const KEY_HEADS = ["Name", "Tenant", "State", "Created", "Expires", ["Used"], [""]];
const TENANT_HEADS = ["Tenant", "Limits, used now", ["Requests"], ["Tokens in, cached"], ["Tokens out"], ["Within goals"], "Cost, seconds of devices", [""]];

let hours = 24;
let measure = "completion_tokens";
let showsEnded = false;

const admin = (path, options = {}) => call(`admin/${path}`, { ...options, with: key("admin") });
const button = (words, act, more) => quiet(words, act, { class: null, ...more });

export function mount(view, { signal }) {
  const page = { keys: [], tenants: [], usage: null, your: "", open: false, costs: [] };
  const trouble = h("div", { class: "panel trouble", hidden: true });
  const chart = h("div", { class: "usage" });
  const keys = h("tbody", {});
  const tenants = h("tbody", {});
  const ended = h("label", { class: "check-label" }, h("input", { type: "checkbox", checked: showsEnded }), "Show revoked and expired");
  const usage = section({ "aria-label": "Usage" }, h("div", { class: "head" }, h("h2", {}, "Usage by key"),
    choice("Measure", MEASURES, measure, (value) => ((measure = value), draw())), choice("Span", SPANS, hours, (value) => ((hours = Number(value)), refresh()))), chart);
  const makeKey = button("Create key", () => createKey(page, refresh), { class: "primary" });
  const makeTenant = button("New tenant", () => editTenant(null, refresh));
  const keysPanel = section({ "aria-label": "Keys" }, h("div", { class: "head" }, h("h2", {}, "Keys"), ended, makeKey), table(KEY_HEADS, keys));
  const tenantsPanel = section({ "aria-label": "Tenants" }, h("div", { class: "head" }, h("h2", {}, "Tenants"), h("p", { class: "hint" }, "Cost and tokens since the gateways started; budgets as they are now"), makeTenant),
      table(TENANT_HEADS, tenants));
  view.append(trouble, usage, keysPanel, tenantsPanel);
  ended.addEventListener("change", () => {
    showsEnded = ended.firstChild.checked;
    draw();
  });

  const draw = () => {
    drawUsage(chart, page);
    drawKeys(keys, page);
    drawTenants(tenants, page);
  };

  async function refresh() {
    try {
      const [known, made, used] = await Promise.all([admin("keys", { signal }), admin("tenants", { signal }), admin(`usage?hours=${hours}`, { signal })]);
      Object.assign(page, { keys: known.keys, your: known.your_key, open: known.open_to_all, tenants: made.tenants, usage: used });
      trouble.hidden = true;
      usage.hidden = keysPanel.hidden = makeTenant.hidden = tenantsPanel.hidden = false;
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) [usage.hidden, keysPanel.hidden, makeTenant.hidden, tenantsPanel.hidden] = [true, true, true, !page.costs.length];
      trouble.hidden = false;
      trouble.replaceChildren(...unread(error, "Keys are made, listed and revoked with an admin key.", "`baton up` without keys makes one: .baton/users/admin.key. Others have it by --admin-key, or by the tenants' file: baton keys new --admin prints the lines."));
    }
    draw();
  }

  view.addEventListener("click", async (event) => {
    const { revoke, edit, remove } = event.target.closest("button")?.dataset ?? {};
    if (revoke) await revokeKey(page, revoke);
    else if (edit) await editTenant(page.tenants.find((one) => one.name === edit), refresh);
    else if (remove && (await confirmed(`Delete ${remove}?`, "What it used stays counted. Its name can be used again.", "Delete"))) await tell(admin(`tenants/${encodeURIComponent(remove)}`, { method: "DELETE" }), `${remove} is deleted.`);
    else return;
    await refresh();
  });
  const timer = setInterval(() => document.hidden || refresh(), AGAIN_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  onKeys(refresh, { signal });
  on("figures", ({ tenants: costs }) => {
    page.costs = costs;
    tenantsPanel.hidden = false;
    drawTenants(tenants, page);
  }, { signal });
  refresh();
}

function choice(name, all, chosen, take) {
  const made = h("fieldset", { class: "segments" }, h("legend", { class: "hidden" }, name), all.map(([value, label]) => h("label", {}, h("input", { type: "radio", name: `usage-${name}`, value, checked: String(value) === String(chosen) }), h("span", {}, label))));
  made.addEventListener("change", (event) => take(event.target.value));
  return made;
}

async function tell(asked, said) {
  try {
    const answer = await asked;
    toast(said);
    return answer;
  } catch (error) {
    toast(error.message, "error");
    return null;
  }
}

// -- usage --

const sum = (series) => series.reduce((all, value) => all + value, 0);
const nameOf = (page, one) => {
  const known = page.keys.find((each) => each.id === one.key);
  if (!one.key && one.tenant.endsWith(":batch")) return `batches of ${one.tenant.slice(0, -6)}`;
  const by = one.key ? known?.name || one.key : "no key";
  return one.tenant && one.tenant !== known?.tenant ? `${by} · ${one.tenant}` : by;
};

function drawUsage(root, page) {
  if (!page.usage) return root.replaceChildren(h("p", { class: "empty" }, "What keys used is shown with an admin key."));
  const { from_unix: from, step_s: step, keys } = page.usage;
  const all = keys.map((one) => ({ ...one, total: sum(one[measure]), values: one[measure] })).filter((one) => one.total).sort((one, other) => other.total - one.total);
  if (!all.length) return root.replaceChildren(h("p", { class: "empty" }, "Nothing was used in this time."));
  const shown = all.slice(0, COLOURS.length);
  const rest = all.slice(COLOURS.length);
  if (rest.length) shown.splice(COLOURS.length - 1, 1, { name: plural(rest.length + 1, "other key"), total: sum([shown.at(-1), ...rest].map((one) => one.total)), values: shown.at(-1).values.map((value, index) => value + sum(rest.map((one) => one.values[index]))) });
  const number = all[0].values.length;
  const columns = Array.from({ length: number }, (_, index) => shown.map((one) => one.values[index]));
  const top = Math.max(...columns.map(sum));
  const label = (index) => new Date((from + index * step) * 1000).toLocaleString([], step < 86_400 ? { weekday: "short", hour: "2-digit", minute: "2-digit", hour12: false } : { day: "numeric", month: "short" });
  const bars = columns.map((parts, index) => h("div", { class: "column", title: `${label(index)}: ${count(sum(parts))}` },
    parts.map((value, place) => (value ? h("span", { class: COLOURS[place], style: { height: `${(100 * value) / top}%` } }) : null)).reverse()));
  const marks = [0, Math.floor(number / 3), Math.floor((2 * number) / 3), number - 1];
  return root.replaceChildren(
    h("div", { class: "bars", role: "img", "aria-label": `${MEASURES.find(([name]) => name === measure)[1]} of ${plural(all.length, "key")}, ${count(sum(all.map((one) => one.total)))} in all` }, h("span", { class: "top num" }, count(top)), h("div", { class: "columns-of" }, bars)),
    h("div", { class: "marks" }, marks.map((index) => h("span", {}, label(index)))),
    h("ul", { class: "legend" }, shown.map((one, place) => h("li", {}, h("i", { class: COLOURS[place] }), one.name ?? nameOf(page, one), " ", h("b", {}, count(one.total))))));
}

// -- keys --

const day = (unix) => (unix ? new Date(unix * 1000).toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" }) : "–");

function drawKeys(body, page) {
  const listed = page.keys.filter((one) => showsEnded || one.state === "active");
  fill(body, KEY_HEADS, listed.map((one) => {
    const used = (page.usage?.keys ?? []).filter((entry) => entry.key === one.id);
    const tokens = sum(used.flatMap((entry) => [...entry.prompt_tokens, ...entry.completion_tokens]));
    const requests = sum(used.flatMap((entry) => entry.requests));
    const isMade = one.source === "made";
    return [one.id, one.state === "active" ? "" : "over", [
      [h("b", {}, one.name || (isMade ? "unnamed" : "in the gateway's files")), one.id === page.your ? h("span", { class: "chip" }, "yours") : null, h("br"), h("small", {}, one.id)],
      one.admin ? h("span", { class: "chip admin" }, "admin") : one.tenant,
      h("span", { class: "phase", "data-state": one.state }, one.state),
      day(one.created_at), one.expires_at ? day(one.expires_at) : isMade ? "never" : "–",
      used.length ? `${plural(requests, "request")}, ${count(tokens)} tok` : "–",
      isMade && one.state === "active" ? quietly({ "data-revoke": one.id, "aria-label": `Revoke ${one.name || one.id}` }, "Revoke") : null]];
  }), page.open ? "No key yet: whoever reaches this gateway may use it." : "No key to show.");
}

async function revokeKey(page, id) {
  const one = page.keys.find((each) => each.id === id);
  const own = id === page.your ? " It is the key that this page uses." : "";
  if (!(await confirmed(`Revoke ${one.name || id}?`, `No gateway takes it any more, a second later at the latest, and that can't be undone. What it began goes on.${own}`, "Revoke"))) return;
  await tell(admin(`keys/${encodeURIComponent(id)}/revoke`, { method: "POST" }), "The key is revoked.");
}

// A dialog with a form; the form's data when it was sent.
function asked(title, parts, verb) {
  const dialog = h("dialog", { class: "asking", "aria-label": title }, h("form", { method: "dialog" }, h("h2", {}, title), parts, h("div", { class: "row" }, h("button", { type: "submit", class: "primary", value: "yes" }, verb), h("button", { type: "submit", value: "no", formnovalidate: true }, "Cancel"))));
  return opened(dialog).then((value) => (value === "yes" ? new FormData(dialog.querySelector("form")) : null));
}

async function createKey(page, refresh) {
  const names = page.tenants.map((one) => one.name);
  const given = await asked("Create a key", [
    page.open ? h("p", {}, "This gateway asks nobody for a key. From the first key on everybody needs one, and it stays so.") : null,
    h("label", {}, "Name, for your eyes ", h("input", { name: "name", maxlength: 64, autocomplete: "off", placeholder: "whose it is, or what for" })),
    h("label", {}, "Tenant ", h("select", { name: "tenant" }, names.map((one) => h("option", { value: one, selected: one === "default" }, one)))),
    h("label", {}, "Valid for, days ", h("input", { name: "days", type: "number", min: 1, max: 3650, placeholder: "until it is revoked" })),
    h("label", { class: "check-label" }, h("input", { name: "admin", type: "checkbox" }), "An administrator's: for this page, metrics and orders to workers, and for no model"),
  ], "Create");
  if (!given) return;
  const isAdmin = given.get("admin") === "on";
  const body = { name: given.get("name").trim(), admin: isAdmin, ...(isAdmin ? {} : { tenant: given.get("tenant") }), ...(given.get("days") ? { expires_in_days: Number(given.get("days")) } : {}) };
  const made = await tell(admin("keys", { method: "POST", body }), "The key is made.");
  if (made) await showKey(made);
  await refresh();
}

// The key itself: this answer alone has it.
async function showKey(made) {
  const field = h("input", { readonly: true, value: made.key, "aria-label": "The key", class: "secret" });
  const copy = button("Copy", async () => {
    field.select();
    try {
      await navigator.clipboard.writeText(made.key);
    } catch {
      document.execCommand("copy"); // over plain HTTP there is no clipboard
    }
    toast("Copied.");
  });
  const dialog = h("dialog", { class: "asking", "aria-label": "The new key" }, h("form", { method: "dialog" }, h("h2", {}, "The new key"), h("p", {}, "It is shown only now: the gateways keep a hash of it."), h("div", { class: "row secret-row" }, field, copy), h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "I have it"))));
  const closed = opened(dialog);
  field.select();
  await closed;
  field.value = "";
}

// -- tenants --

function drawTenants(body, page) {
  const cost = (one) => (one?.prefill_s ?? 0) + (one?.decode_s ?? 0);
  const all = page.costs.reduce((total, one) => total + cost(one), 0);
  const names = [...new Set([...page.tenants.map((one) => one.name), ...page.costs.map((one) => one.tenant)])].sort();
  fill(body, TENANT_HEADS, names.map((name) => {
    const options = page.tenants.find((one) => one.name === name);
    const used = page.costs.find((one) => one.tenant === name);
    const keys = page.keys.filter((one) => one.tenant === name && one.state === "active").length;
    const told = [options?.source === "file" ? "in the file" : (options?.source ?? ""), keys ? plural(keys, "key") : "", options && options.weight !== 1 ? `weight ${options.weight}` : ""];
    const act = (verb, words, data) => quietly({ "aria-label": `${words} ${name}`, [`data-${data}`]: name }, verb);
    return [name, "", [
      [h("b", {}, name), h("br"), h("small", {}, told.filter(Boolean).join(", "))],
      limits(options, used), count(used?.requests),
      used?.prompt_tokens === undefined ? "–" : `${count(used.prompt_tokens)}, ${share(used.cached_tokens, used.prompt_tokens)}`, count(used?.completion_tokens),
      used?.judged ? share(used.good, used.judged) : "–",
      used ? meter("costs", `${seconds(cost(used))}, ${share(cost(used), all)}`, cost(used), all) : "–",
      [options && options.source !== "file" ? act("Limits", "Limits of", "edit") : null, options?.source === "made" && !keys ? act("Delete", "Delete", "remove") : null]]];
  }), "No request yet.");
}

function limits(options, used) {
  const now = Object.entries(used?.budgets ?? {}).map(([name, { used: taken, limit }]) => meter(taken >= 0.9 * limit ? "full" : "", `${count(Math.max(0, taken))} of ${count(limit)} ${BUDGETS[name] ?? name}`, taken, limit));
  if (now.length) return now;
  const set = [[options?.requests_per_minute, BUDGETS.requests], [options?.tokens_per_minute, BUDGETS.tokens], [options?.max_concurrent, BUDGETS.concurrent]].filter(([value]) => value);
  return set.length ? set.map(([value, name]) => h("div", {}, `${count(value)} ${name}`)) : h("span", { class: "hint" }, "no limit");
}

const meter = (kind, text, part, whole) => h("div", { class: `budget ${kind}` }, h("span", {}, text), h("span", { class: "kvbar", "aria-hidden": "true" }, h("span", { class: "used", style: { width: `${whole ? Math.min(100, Math.max(0, (100 * part) / whole)) : 0}%` } })));

async function editTenant(options, refresh) {
  const name = options ? null : h("label", {}, "Name ", h("input", { name: "name", required: true, pattern: "[A-Za-z0-9_.\\-]{1,64}", maxlength: 64, autocomplete: "off", title: "1 to 64 letters, digits and _.-" }));
  const given = await asked(options ? `Limits of ${options.name}` : "New tenant", [name, ...LIMITS.map(([field, label, usual, rule]) => h("label", {}, label, " ", h("input", { name: field, type: "number", required: true, value: options?.[field] ?? usual, ...rule }))),
    ...GOALS.map(([field, label, rule]) => h("label", {}, label, " ", h("input", { name: field, type: "number", value: options?.[field] ?? "", ...rule }))),
    h("label", { class: "check-label" }, h("input", { name: "shares", type: "checkbox", checked: options?.shares_cache ?? false }), "Shares cached prefixes with all others that share: they may see by the time what was asked before")], options ? "Set" : "Create");
  if (!given) return;
  const target = options?.name ?? given.get("name");
  const body = Object.fromEntries(LIMITS.map(([field]) => [field, Number(given.get(field))]));
  for (const [field] of GOALS) if (given.get(field)) body[field] = Number(given.get(field));
  if (given.get("shares") === "on") body.cache_salt = "";
  else if (options?.shares_cache) body.cache_salt = target; // left out, it would stay as it is
  await tell(admin(`tenants/${encodeURIComponent(target)}`, { method: "POST", body }), options ? "The limits hold for its next requests." : `${target} is made: create a key for it.`);
  await refresh();
}
