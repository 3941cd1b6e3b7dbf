// Addresses: `console/PAGE/…` under the gateway's root, by the browser's history. A link within is a plain <a href>.

import { byId, h } from "./dom.js";
import { PAGES } from "./pages.js";

export const ROOT = new URL("../../../", import.meta.url);
const HOME = "chat";
let current = null; // {page, update, leaving}
let shown = 0; // the newest navigation: a page that loads slowly does not replace a later one

// The address of a page: href("requests", id) or href("requests", {status: "error"}).
export function href(page, ...parts) {
  const query = typeof parts.at(-1) === "object" ? parts.pop() : {};
  const url = new URL(`console/${[page, ...parts].map(encodeURIComponent).join("/")}`, ROOT);
  for (const [name, value] of Object.entries(query)) if (value !== "" && value !== null && value !== undefined && value !== false) url.searchParams.set(name, value);
  return url.pathname + url.search;
}

// Go to an address of href(). `replace`: instead of the present one, as for a filter that changed.
export function go(address, { replace = false } = {}) {
  keepScroll();
  history[replace ? "replaceState" : "pushState"]({}, "", address);
  return show(replace ? null : 0);
}

// {name, page, path, query}: `path` has what follows the page's name, decoded; `page` is null when there is no such page.
export function here() {
  const [name, ...path] = decode(location.pathname.slice(ROOT.pathname.length)).slice(1);
  const page = path.length > 1 ? null : PAGES.find((one) => one.name === name);
  return { name, page: page ?? null, path, query: new URLSearchParams(location.search) };
}

function decode(path) {
  return path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
}

const keepScroll = () => history.replaceState({ ...history.state, y: scrollY }, "");

export function startRouter(onPage) {
  history.scrollRestoration = "manual";
  if (!here().name) history.replaceState({}, "", href(HOME));
  addEventListener("popstate", () => show(history.state?.y ?? 0));
  addEventListener("pagehide", keepScroll);
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    if (link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
    const [top, name] = decode(link.pathname.slice(ROOT.pathname.length));
    if (top !== "console" || !PAGES.some((page) => page.name === name)) return;
    event.preventDefault();
    if (link.href !== location.href) go(link.pathname + link.search);
  });
  router.onPage = onPage;
  return show(history.state?.y ?? 0);
}

const router = { onPage: () => {} };

// Show what the address says. `y`: where to scroll to; null: nowhere.
async function show(y) {
  const { name, page, path, query } = here();
  if (!name) return go(href(HOME), { replace: true });
  const mine = ++shown;
  if (!page) return showNothing();
  if (current?.page === page && current.update) {
    current.update({ path, query });
    if (y !== null) scrollTo(0, y);
    return;
  }
  const sameYet = () => mine === shown;
  router.onPage(page);
  let module;
  try {
    [module] = await Promise.all([import(`../pages/${page.name}.js`), page.styles ? style(page.name) : null]);
  } catch (error) {
    if (!sameYet()) return;
    console.error(error);
    leave();
    view().replaceChildren(h("p", { class: "empty" }, "This page could not be loaded: is the gateway there?"));
    return;
  }
  if (!sameYet()) return;
  leave();
  const leaving = new AbortController();
  current = { page, leaving, update: null };
  const parts = h("div", { class: `page page-${page.name}` });
  const moved = document.activeElement !== document.body && document.activeElement?.isConnected;
  view().replaceChildren(parts);
  const made = module.mount(parts, { path, query, signal: leaving.signal });
  current.update = made?.update ?? null;
  if (moved && y === 0) byId("main").focus({ preventScroll: true });
  if (y !== null) scrollTo(0, y);
}

function showNothing() {
  leave();
  router.onPage({ name: "", title: "No such page" });
  view().replaceChildren(h("section", { class: "card-alone" }, h("h2", {}, "No such page"),
    h("p", {}, "There is nothing at ", h("code", {}, location.pathname), "."), h("p", {}, h("a", { class: "button", href: href(HOME) }, "Go to the chat"))));
}

function leave() {
  current?.leaving.abort();
  current = null;
}

const view = () => byId("view");

// Load a page's style sheet once, and wait for it.
function style(name) {
  const url = new URL(`../pages/${name}.css`, import.meta.url).href;
  if ([...document.styleSheets].some((sheet) => sheet.href === url)) return null;
  return new Promise((resolve) => {
    const link = h("link", { rel: "stylesheet", href: url });
    link.addEventListener("load", resolve);
    link.addEventListener("error", resolve);
    document.head.append(link);
  });
}
