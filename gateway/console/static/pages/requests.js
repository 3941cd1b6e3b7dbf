// Requests of all gateways: a live table with filters, and one of them with its time line, attempts and placement.

import { ApiError, call, operator, readRequest } from "../frame/api.js";
import { h, patch, scroll, section, toast } from "../frame/dom.js";
import { feed } from "../frame/feed.js";
import { clock, count, ms } from "../frame/format.js";
import { shortName } from "../frame/names.js";
import { go, href, ROOT } from "../frame/router.js";
import { KINDS, requestDetail } from "../frame/waterfall.js";

const EVERY_MS = 1500;
const FILTERS = ["q", "status", "order", "model", "tenant", "key", "worker", "min_ms", "order"];
const STATUSES = { "": "any status", running: "running", waiting: "waiting", done: "done", error: "failed", cancelled: "cancelled", refused: "refused" };
const ORDERS = { "": "newest first", ttft: "slowest TTFT first", total: "longest first" };
const PHASES = [["http", "read"], ["admission", "wait"], ["queue", "queue"], ["prefill", "prefill"], ["first_frame", "frame"]];

let listed = { ids: [], query: {} }; // of the table as it was last shown, for "next" and "previous"

export function mount(view, { path, query, signal }) {
  let leave = new AbortController();
  const show = ({ path, query }) => {
    leave.abort();
    leave = new AbortController();
    const gone = AbortSignal.any([signal, leave.signal]);
    view.replaceChildren();
    if (path.length) showOne(view, path[0], gone);
    else showTable(view, query, gone);
  };
  show({ path, query });
  return {
    update({ path, query }) {
      const filters = view.querySelector(".filters");
      if (!path.length && filters) filters.dispatchEvent(new CustomEvent("wanted", { detail: query }));
      else show({ path, query });
    },
  };
}

// -- the table --

function showTable(view, query, signal) {
  const select = (name, choices) => h("select", { name, "aria-label": name === "order" ? "Order" : name }, Object.entries(choices).map(([value, words]) => h("option", { value }, words)));
  const field = (name, label, more) => h("input", { name, "aria-label": label, placeholder: label, autocomplete: "off", spellcheck: "false", ...more });
  const pause = h("button", { type: "button", "aria-pressed": "false", title: "Keep the table as it is (key p)" }, "Pause");
  const more = h("button", { type: "button", class: "unfold", "aria-expanded": "false" }, "Filters");
  const filters = h("form", { class: "filters", role: "search" },
    field("q", "Search id, trace, tenant, worker, model", { type: "search" }), select("status", STATUSES),
    h("div", { class: "more" }, field("tenant", "tenant", {}), field("model", "model", {}), field("worker", "worker", { list: "workers" }),
      field("min_ms", "≥ ms", { inputmode: "numeric" }), select("order", ORDERS)), more, pause,
    h("datalist", { id: "workers" }, (feed.state.workers ?? []).map((worker) => h("option", { value: worker.id }))));
  const summary = h("p", { class: "hint", role: "status" });
  const body = h("tbody", {});
  const axis = h("th", { scope: "col", class: "axis-cell" });
  const table = h("table", { class: "requests" },
    h("thead", {}, h("tr", {}, [["request"], ["time"], ["status"], ["tenant", "wide"], ["workers", "mid"], ["in", "num mid"], ["out", "num mid"], ["TTFT", "num"], ["total", "num"]]
      .map(([name, kind]) => h("th", { scope: "col", class: kind }, name)), axis)), body);
  const legend = h("div", { class: "legend", "aria-hidden": "true" }, ["read", "wait", "queue", "prefill", "frame", "decode"].map((kind) => h("span", {}, h("i", { class: kind }), kind === "decode" ? "decode" : KINDS[kind])));
  view.append(section({ "aria-label": "Requests" }, filters, h("div", { class: "under" }, summary, legend), scroll("Requests", table)));

  let timer = 0;
  let paused = false;
  const wanted = () => Object.fromEntries(FILTERS.map((name) => [name, filters.elements[name] ? filters.elements[name].value.trim() : query.get(name) ?? ""]).filter(([, value]) => value));
  const fill = () => {
    for (const name of FILTERS) if (filters.elements[name]) filters.elements[name].value = query.get(name) ?? "";
  };
  const ask = async () => {
    clearTimeout(timer);
    if (!paused && !document.hidden && feed.live !== "key") {
      try {
        const { requests } = await call(`console/search?${new URLSearchParams(wanted())}`, { with: operator(), signal });
        if (!paused) draw(requests);
      } catch (error) {
        if (signal.aborted) return;
        summary.textContent = error instanceof ApiError ? error.message : String(error);
      }
    }
    if (!signal.aborted) timer = setTimeout(ask, EVERY_MS);
  };
  const draw = (requests) => {
    listed = { ids: requests.map((one) => one.request_id), query: wanted() };
    const longest = Math.max(1, ...requests.map((one) => one.total_ms ?? 0));
    const many = (feed.state.gateways?.length ?? 1) > 1;
    summary.textContent = requests.length >= 100 ? "the first 100 of more" : `${requests.length} found`;
    axis.replaceChildren(h("span", { class: "scale" }, [0, 0.5, 1].map((part) => h("span", { style: { left: `${100 * part}%` } }, part ? ms(longest * part) : "0"))));
    patch(body, requests.length ? requests.map((one) => row(one, longest, many)) : [h("tr", { "data-key": "none" }, h("td", { colspan: 10, class: "empty" }, "No such request is known: each gateway keeps its newest 512, those that run and the slowest."))]);
  };
  more.addEventListener("click", () => more.setAttribute("aria-expanded", String(filters.classList.toggle("open"))));
  filters.addEventListener("submit", (event) => event.preventDefault());
  let typed = 0;
  filters.addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => go(href("requests", wanted()), { replace: true }), 250);
  });
  filters.addEventListener("wanted", ({ detail }) => {
    query = detail;
    if (!filters.contains(document.activeElement)) fill();
    ask();
  });
  const toggle = () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Go on" : "Pause";
    ask();
  };
  pause.addEventListener("click", toggle);
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "p") toggle();
    if (event.key === "/") {
      event.preventDefault();
      filters.elements.q.focus();
    }
  }, { signal });
  body.addEventListener("click", (event) => {
    const line = event.target.closest("tr[data-key]");
    if (line && !event.target.closest("a") && !String(getSelection()) && line.dataset.key !== "none") go(href("requests", line.dataset.key));
  });
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    clearTimeout(typed);
  });
  fill();
  ask();
}

const FAILED = ["error", "refused"];

const badge = ({ status, detail, num_attempts: attempts }) => h("span", { class: `badge ${FAILED.includes(status) ? "bad" : status}`, title: detail }, status, attempts > 1 ? ` ×${attempts}` : "");

function row(one, longest, manyGateways) {
  const bad = FAILED.includes(one.status);
  const workers = [...new Set([one.prefill_worker, one.decode_worker])].filter(Boolean);
  const where = workers.map(shortName).join(" → ");
  const asker = one.key ? `${one.tenant} / ${one.key}` : one.tenant;
  return h("tr", { "data-key": one.request_id, class: one.status },
    h("td", {}, h("a", { href: href("requests", one.request_id), title: one.request_id }, shorten(one.request_id))),
    h("td", { class: "num when" }, clock(one.received_unix)),
    h("td", {}, badge(one)),
    h("td", { class: "wide" }, asker),
    h("td", { class: "mid cut", title: one.detail || workers.join(" → ") }, one.status === "refused" || (bad && !where) ? one.detail : manyGateways ? `${shortName(one.gateway)}: ${where}` : where),
    h("td", { class: "num mid" }, count(one.prompt_tokens), one.cached_tokens ? h("small", {}, ` ${count(one.cached_tokens)} hit`) : ""),
    h("td", { class: "num mid" }, count(one.completion_tokens)),
    h("td", { class: "num" }, ms(one.ttft_ms)),
    h("td", { class: "num" }, ms(one.total_ms)),
    h("td", { class: "axis-cell" }, phases(one, longest)));
}

function phases(one, longest) {
  const width = (value) => ({ width: `${Math.min(100, (100 * value) / longest)}%` });
  const parts = PHASES.filter(([phase]) => one.phases_ms[phase]).map(([phase, kind]) => h("span", { class: kind, style: width(one.phases_ms[phase]) }));
  if (one.ttft_ms !== null) parts.push(h("span", { class: "decode", style: width(one.total_ms - one.ttft_ms) }));
  if (one.status === "waiting") parts.push(h("span", { class: "wait", style: width(one.total_ms) }));
  return h("span", { class: "phases", "aria-hidden": "true" }, parts);
}

const shorten = (id) => id.replace(/^(chatcmpl|cmpl)-/, "").replace(/^([0-9a-zA-Z]{8})[0-9a-zA-Z]+/, "$1");

// -- one request --

function showOne(view, id, signal) {
  const neighbour = (step, words, keyName) => {
    const at = listed.ids.indexOf(id);
    const other = at >= 0 ? listed.ids[at + step] : undefined;
    return other ? h("a", { class: "button", href: href("requests", other), "data-go": keyName, title: `key ${keyName}` }, words) : h("span", { class: "button off", "aria-disabled": "true" }, words);
  };
  const actions = h("div", { class: "row" });
  const state = h("span", { class: "told" });
  const body = h("div", { class: "one" }, h("p", { class: "empty" }, "Loading"));
  const around = h("span", { class: "row" }, neighbour(-1, "Previous", "k"), neighbour(1, "Next", "j"));
  if (!listed.ids.includes(id)) {
    call("console/search", { with: operator(), signal }).then(({ requests }) => {
      listed = { ids: requests.map((one) => one.request_id), query: {} };
      around.replaceChildren(neighbour(-1, "Previous", "k"), neighbour(1, "Next", "j"));
    }, () => {}); // without the list there are no neighbours
  }
  view.append(h("nav", { class: "crumbs", "aria-label": "Requests" },
    h("a", { href: href("requests", listed.query), "data-go": "Escape" }, "← Requests"), around),
    h("section", { class: "panel" }, h("div", { class: "head" }, h("h2", { class: "id" }, id), state, actions), body));
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    const link = view.querySelector(`a[data-go="${CSS.escape(event.key)}"]`);
    if (link) link.click();
  }, { signal });

  let timer = 0;
  let before = "";
  const ask = async () => {
    try {
      const found = await readRequest(id);
      if (signal.aborted) return;
      const now = JSON.stringify(found);
      if (now !== before) draw(found, now);
      before = now;
      if (found.some((one) => one.status === "running" || one.status === "waiting")) timer = setTimeout(ask, 1000);
    } catch (error) {
      if (!signal.aborted) body.replaceChildren(h("p", { class: "note error" }, error.message));
    }
  };
  const draw = (found, now) => {
    const trace = traceLink(found[0].trace_id);
    actions.replaceChildren(copier("Copy id", () => id), copier("Copy JSON", () => JSON.stringify(found, null, 2)), copier("Copy curl", () => curlOf(id)),
      ...(trace ? [h("a", { class: "button", href: trace, target: "_blank", rel: "noreferrer" }, "Open trace")] : []));
    state.replaceChildren(...found.slice(0, 1).flatMap((one) => [badge(one), one.detail ? h("span", { class: FAILED.includes(one.status) ? "why bad" : "why" }, one.detail) : ""]));
    const open = body.querySelector("details.json")?.open ?? false;
    body.replaceChildren(...found.map(requestDetail), h("details", { class: "json", open }, h("summary", {}, "JSON"), h("pre", { tabindex: 0 }, JSON.stringify(JSON.parse(now), null, 2))));
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  ask();
}

function copier(words, text) {
  const button = h("button", { type: "button" }, words);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      toast("Copied.");
    } catch {
      toast("The browser does not let this page copy: it needs HTTPS or localhost.", "error");
    }
  });
  return button;
}

// What asks the gateway for the same. A request's prompt is kept by nobody.
const curlOf = (id) => `curl '${new URL(`debug/requests/${encodeURIComponent(id)}`, ROOT)}'${operator() ? " -H \"Authorization: Bearer $BATON_ADMIN_KEY\"" : ""}`;

function traceLink(trace) {
  const template = feed.state.trace_url;
  return template && trace && /^https?:/.test(template) ? template.replaceAll("{trace_id}", encodeURIComponent(trace)) : "";
}
