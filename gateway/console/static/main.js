// The console's frame: rail, keys, theme, the line about what is wrong; pages come and go in <main>.

import { byId, h, svg } from "./frame/dom.js";
import { feed, on, startFeed } from "./frame/feed.js";
import { clock } from "./frame/format.js";
import { openKeys, startKeys } from "./frame/keys.js";
import { PAGES } from "./frame/pages.js";
import { href, startRouter } from "./frame/router.js";
import { startTheme } from "./frame/theme.js";

let page = null;

function startRail() {
  const icon = (path) => svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: path }));
  byId("pages").append(...PAGES.map((one) => h("a", { href: href(one.name), "data-page": one.name }, icon(one.icon), one.title)));
  byId("home").href = href(PAGES[0].name);
  const open = (is) => {
    byId("rail").classList.toggle("open", is);
    byId("menu").setAttribute("aria-expanded", String(is));
  };
  byId("menu").addEventListener("click", () => open(!byId("rail").classList.contains("open")));
  byId("rail").addEventListener("click", (event) => event.target.closest("a") && open(false));
  document.addEventListener("click", (event) => event.target.closest("#rail") || open(false));
  document.addEventListener("keydown", (event) => event.key === "Escape" && open(false));
}

function enter(next) {
  page = next;
  for (const link of byId("pages").children) {
    if (link.dataset.page === page.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("title").textContent = page.title;
  status();
}

// What is wrong, in one line above the page.
function status() {
  const { state, live, problem } = feed;
  document.title = `${state.not_ready ? "Not ready · " : ""}${page ? `${page.title} · ` : ""}Baton`;
  byId("live").className = `live ${live === "live" && state.not_ready ? "bad" : live}`;
  byId("live").textContent = { live: state.not_ready ? "outage" : "live", key: "no key", lost: "no answer", connecting: "connecting" }[live] ?? "";
  if (state.model) byId("where").textContent = `${state.model} · ${state.gateway} · ${state.version}`;
  if (live === "connecting") return;
  document.body.classList.add("loaded");
  const stale = feed.answered ? ` What you see is of ${clock(feed.answered)}.` : "";
  if (live === "lost") banner("warn", `${problem[0].toUpperCase()}${problem.slice(1)}.${stale}`);
  else if (live === "live" && state.not_ready) banner("bad", `No request is served${since(state.not_ready_since)}: ${state.not_ready}.`);
  else banner("", "");
  lock(live === "key" && page?.operator ? problem.replace(/: send.*/, "") : "");
  byId("main").classList.toggle("stale", live === "lost" && Boolean(feed.answered) && Boolean(page?.operator));
}

const since = (unix) => (unix ? ` since ${clock(unix)}` : " now");

function banner(kind, text) {
  if (byId("banner").textContent !== text) byId("banner").textContent = text;
  byId("banner").className = `banner ${kind}`;
  byId("banner").hidden = !text;
}

// A card in the page's place, while what it would show is not told without a key.
function lock(why) {
  const text = why ? `It tells of everybody's requests, so ${why}.` : "";
  if (byId("locked-text").textContent !== text) byId("locked-text").textContent = text;
  byId("locked").hidden = !why;
  byId("view").hidden = Boolean(why);
}

startTheme();
startKeys();
startRail();
byId("icon").href = new URL("./icon.svg", import.meta.url).href; // browsers may ask for it when the address is another one
byId("locked-keys").addEventListener("click", () => openKeys(feed.problem.includes("admin") ? "admin" : "api"));
on("*", status);
startRouter(enter);
startFeed();
