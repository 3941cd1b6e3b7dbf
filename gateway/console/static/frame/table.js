// Tables of what operators manage.

import { h, patch, scroll } from "./dom.js";

// A table whose rows are cards on a phone. Heads: words, or [words, "num"]; rows: [key, class, cells], a cell {class, words} or its words.
export const table = (heads, body) => scroll("Table",
  h("table", {}, h("thead", {}, h("tr", {}, heads.map((one) => h("th", { scope: "col", class: isNumber(one) ? "num" : null }, wordsOf(one))))), body), " cards");

export function fill(body, heads, rows, nothing) {
  if (!rows.length) return patch(body, [h("tr", { "data-key": "none" }, h("td", { colspan: heads.length, class: "empty" }, nothing))]);
  return patch(body, rows.map(([key, kind, cells]) => h("tr", { "data-key": key, class: kind || null },
    cells.map((words, index) => h("td", { class: isNumber(heads[index]) ? "num" : null, "data-label": wordsOf(heads[index]) || null }, [words].flat())))));
}

const isNumber = (head) => Array.isArray(head);
const wordsOf = (head) => (Array.isArray(head) ? head[0] : head);
