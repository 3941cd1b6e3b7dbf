// Markdown as elements. A vendored parser makes tokens; elements are made of these here, so nothing is ever parsed as HTML: what a
// model writes as HTML is shown as it is.

import { h, quietly, toast } from "../frame/dom.js";
import { Lexer } from "../vendor/marked.js";
import { highlighted } from "./highlight.js";

const MAX_CHARS = 400_000; // of one block; beyond, it is plain text
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const LINK = /^(https?:|mailto:)/i;

const decoded = (text) => text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (all, ten, sixteen, name) => {
  const code = ten ? Number(ten) : sixteen ? parseInt(sixteen, 16) : 0;
  return code && code <= 0x10ffff ? String.fromCodePoint(code) : (ENTITIES[name] ?? all);
});

// Tokens as nodes: a text, or [tag, attributes, ...children]. Pure.
export const nodesOf = (tokens) => (tokens ?? []).flatMap((token) => (MAKERS[token.type] ? MAKERS[token.type](token) : token.raw ? [token.raw] : []));

const inner = (token) => nodesOf(token.tokens);
const cell = (tag) => ({ align, tokens }) => [tag, align ? { class: align } : {}, ...nodesOf(tokens)];
const MAKERS = {
  space: () => [],
  def: () => [],
  heading: (token) => [[`h${Math.min(6, token.depth + 2)}`, { class: `h${token.depth}` }, ...inner(token)]],
  paragraph: (token) => [["p", {}, ...inner(token)]],
  text: (token) => (token.tokens ? inner(token) : [decoded(token.text)]),
  escape: (token) => [token.text],
  code: (token) => [["code-block", { language: (token.lang ?? "").split(/\s/)[0] }, token.text]],
  codespan: (token) => [["code", {}, token.text]],
  strong: (token) => [["strong", {}, ...inner(token)]],
  em: (token) => [["em", {}, ...inner(token)]],
  del: (token) => [["del", {}, ...inner(token)]],
  br: () => [["br", {}]],
  hr: () => [["hr", {}]],
  blockquote: (token) => [["blockquote", {}, ...inner(token)]],
  html: (token) => (/^<br\s*\/?>$/i.test(token.raw.trim()) ? [["br", {}]] : token.block ? [["p", { class: "raw" }, token.raw.trimEnd()]] : [token.raw]),
  image: (token) => [link(token.href, [`${token.text || "image"}`])],
  link: (token) => [link(token.href, inner(token))],
  checkbox: (token) => [["span", { class: `check ${token.checked ? "done" : ""}`, role: "img", "aria-label": token.checked ? "done" : "open" }]],
  list: (token) => [[token.ordered ? "ol" : "ul", token.ordered && token.start !== 1 ? { start: token.start } : {}, ...token.items.map((item) => ["li", item.task ? { class: "task" } : {}, ...inner(item)])]],
  table: (token) => [["div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, ["table", {},
    ["thead", {}, ["tr", {}, ...token.header.map(cell("th"))]],
    ["tbody", {}, ...token.rows.map((row) => ["tr", {}, ...row.map(cell("td"))])]]]],
};

const link = (href, words) => (LINK.test(href) ? ["a", { href, target: "_blank", rel: "noopener noreferrer" }, ...words] : ["span", { class: "raw", title: href }, ...words]);

function build(node) {
  if (typeof node === "string") return node;
  const [tag, attributes, ...children] = node;
  return tag === "code-block" ? codeBlock(children[0], attributes.language) : h(tag, attributes, children.map(build));
}

export function copyText(text, what = "Copied.") {
  const done = () => toast(what);
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(done, () => toast("The browser doesn't let this page copy.", "error"));
  const field = h("textarea", { class: "hidden" }); // over plain HTTP there is no clipboard
  field.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  toast(document.execCommand("copy") ? what : "The browser doesn't let this page copy.");
  field.remove();
  return Promise.resolve();
}

export function codeBlock(text, language = "", label = "") {
  const code = h("code", {}, paint(text, language));
  const copy = quietly({ "aria-label": "Copy code" }, "Copy");
  copy.addEventListener("click", () => copyText(code.textContent));
  const block = h("div", { class: "code" }, h("div", { class: "codehead" }, h("span", {}, label || language || "text"), copy),
    h("pre", { tabindex: 0, role: "region", "aria-label": `Code${language ? `, ${language}` : ""}` }, code));
  block.show = (newer) => {
    if (newer.startsWith(block.text)) code.append(newer.slice(block.text.length));
    else code.textContent = newer;
    block.text = newer;
  };
  block.text = text;
  block.language = language;
  return block;
}

const paint = (text, language) => highlighted(text, language).map(([kind, run]) => (kind ? h("span", { class: `hl-${kind}` }, run) : run));

const keyOf = (list) => `${list.ordered} ${list.loose} ${list.start}`;

// Markdown that grows. Only its last block is made anew: what lies before it can't change any more.
export class Growing {
  #root;
  #fixed = 0; // characters whose elements stay
  #tail = []; // elements of the last block
  #items = null; // of a list at the end: what its items were made of
  #links = {};
  #text = "";
  #isTooDeep = false;

  constructor(root) {
    this.#root = root;
  }

  show(given, { done = false } = {}) {
    const text = given.replace(/\r\n?/g, "\n"); // as the parser does
    if (!text.startsWith(this.#text)) this.#clear();
    this.#text = text;
    const rest = text.slice(this.#fixed);
    if (rest.length > MAX_CHARS) return this.#plain(rest);
    const tokens = this.#lex(rest);
    let last = tokens.length - 1;
    while (last > 0 && tokens[last].type === "space") last--;
    const settled = done ? tokens.length : Math.max(0, last);
    const before = tokens.slice(0, settled);
    const after = tokens.slice(settled);
    const [open] = this.#tail;
    if (!settled && after[0]?.type === "code" && open?.show && this.#tail.length === 1 && open.language === nodesOf(after)[0]?.[1].language) return open.show(after[0].text);
    if (!settled && after.length && after[0].type === "list" && this.#grow(after[0])) return undefined;
    this.#items = null;
    for (const element of this.#tail) element.remove();
    for (const { type, tag, href, title } of before) if (type === "def") this.#links[tag] ??= { href, title };
    this.#root.append(...nodesOf(before).map(build));
    this.#fixed += before.reduce((sum, token) => sum + token.raw.length, 0);
    this.#tail = nodesOf(after).map(build).map((one) => (typeof one === "string" ? new Text(one) : one));
    this.#root.append(...this.#tail);
    if (after[0]?.type === "list") this.#items = { key: keyOf(after[0]), raws: after[0].items.map((item) => item.raw) };
    return undefined;
  }

  // A list that got longer: only the items that changed are made anew. Whether it was such a list.
  #grow(list) {
    if (this.#items?.key !== keyOf(list)) return false;
    const [, , ...items] = nodesOf([list])[0];
    const [element] = this.#tail;
    const { raws } = this.#items;
    let same = 0;
    while (same < raws.length && raws[same] === list.items[same]?.raw) same++;
    while (element.childElementCount > same) element.lastElementChild.remove();
    element.append(...items.slice(same).map(build));
    this.#items.raws = list.items.map((item) => item.raw);
    return true;
  }

  // Links that were defined before hold for the rest: whole ones, not the beginning of one that still comes.
  #lex(text) {
    const lexer = new Lexer({ gfm: true });
    Object.assign(lexer.tokens.links, this.#links);
    try {
      if (!this.#isTooDeep) return lexer.lex(text);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.#isTooDeep = true; // for the parser's stack
    }
    return [{ type: "html", block: true, raw: text }]; // as it is
  }

  #plain(rest) {
    for (const element of this.#tail) element.remove();
    this.#tail = [h("p", { class: "raw" }, rest)];
    this.#root.append(...this.#tail);
  }

  #clear() {
    this.#root.replaceChildren();
    [this.#fixed, this.#tail, this.#items, this.#links, this.#text, this.#isTooDeep] = [0, [], null, {}, "", false];
  }
}

export function markdown(text) {
  const root = h("div", { class: "md" });
  new Growing(root).show(text, { done: true });
  return root;
}
