// The conversations that this browser has, with a search.

import { confirmed, h, patch, save, toast } from "../frame/dom.js";
import { href } from "../frame/router.js";
import { asJson, parsed } from "./share.js";
import * as store from "./store.js";
import { imported, matches, titleOf } from "./tree.js";

const DAY_MS = 86_400_000;
const BIGGEST = 64 << 20; // bytes of a file to import

export function listView({ fresh, renamed, removed, options }) {
  const search = h("input", { type: "search", placeholder: "Search chats", "aria-label": "Search chats" });
  const entries = h("ul", { class: "conversations" });
  const file = h("input", { type: "file", accept: ".json,application/json", class: "hidden", tabindex: -1, "aria-label": "File of chats" });
  const act = (words, does, kind = "quiet") => {
    const made = h("button", { type: "button", class: kind }, words);
    made.addEventListener("click", does);
    return made;
  };
  const element = h("nav", { class: "list", "aria-label": "Chats" }, act("New chat", fresh, "primary"), search, entries,
    h("div", { class: "row" }, act("Import", () => file.click()), act("Export", exportAll), act("Clear", clear)), file);
  let heads = [];
  let current = "";

  const draw = () => {
    const wanted = search.value.trim();
    const found = wanted ? heads.filter((one) => matches(`${one.title}\n${one.words}`, wanted)) : heads;
    let group = "";
    const rows = found.flatMap((one) => {
      const name = groupOf(one.updated);
      const heading = name === group ? [] : [h("li", { class: "group", "data-key": `g-${name}` }, name)];
      group = name;
      return [...heading, row(one)];
    });
    patch(entries, rows.length ? rows : [h("li", { class: "empty", "data-key": "none" }, wanted ? "No chat has these words." : "Chats are kept in this browser.")]);
  };

  const row = (one) => h("li", { "data-key": one.id, class: one.id === current ? "current" : "" },
    h("a", { href: href("chat", one.id), "aria-current": one.id === current ? "true" : null }, one.title),
    h("button", { type: "button", class: "icon-button", "data-rename": one.id, "aria-label": `Rename ${one.title}`, title: "Rename" }, "✎"),
    h("button", { type: "button", class: "icon-button", "data-remove": one.id, "aria-label": `Delete ${one.title}`, title: "Delete" }, "✕"));

  entries.addEventListener("click", async (event) => {
    const { rename, remove } = event.target.closest("button")?.dataset ?? {};
    const one = heads.find((head) => head.id === (rename ?? remove));
    if (!one) return;
    if (rename) return askTitle(event.target.closest("li"), one);
    if (!(await confirmed("Delete this chat?", `“${one.title}” is gone then: it is only in this browser.`, "Delete"))) return;
    await store.remove(one.id);
    removed(one.id);
    await refresh();
  });

  function askTitle(item, one) {
    const field = h("input", { value: one.title, "aria-label": "Title", maxlength: 200 });
    const end = async (keeps) => {
      if (!field.isConnected || field.dataset.over) return;
      field.dataset.over = "1";
      const title = field.value.trim();
      if (keeps && title && title !== one.title) {
        await store.rename(one.id, title);
        renamed(one.id, title);
      }
      field.remove();
      await refresh();
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter");
    });
    item.replaceChildren(field);
    item.removeAttribute("data-key");
    field.focus();
    field.select();
  }

  async function exportAll() {
    download(asJson(await store.all()), "baton-chats.json", "application/json");
  }

  async function clear() {
    if (!heads.length || !(await confirmed("Delete all chats?", `${heads.length} chats are gone then: they are only in this browser.`, "Delete all"))) return;
    await store.removeAll();
    removed("");
    await refresh();
  }

  file.addEventListener("change", async () => {
    const [given] = file.files;
    file.value = "";
    if (!given) return;
    try {
      if (given.size > BIGGEST) throw new Error("it is larger than 64 MB");
      const found = parsed(await given.text()).map((one) => imported(one, options()));
      for (const one of found) await store.save(one, titleOf(one));
      toast(`${found.length} imported.`);
      await refresh();
    } catch (error) {
      toast(`${given.name}: ${error.message}`, "error");
    }
  });
  search.addEventListener("input", draw);

  async function refresh(id = current) {
    current = id;
    try {
      heads = await store.list();
    } catch (error) {
      heads = [];
      toast(`Chats can't be kept in this browser: ${error.message}`, "error");
    }
    draw();
  }
  return { element, refresh };
}

function groupOf(updated) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  return updated >= midnight ? "Today" : updated >= midnight - DAY_MS ? "Yesterday" : updated >= midnight - 7 * DAY_MS ? "Last 7 days" : updated >= midnight - 30 * DAY_MS ? "Last 30 days" : "Older";
}

export const download = (text, name, type) => save(new Blob([text], { type }), name);
