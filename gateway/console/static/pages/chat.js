// Chat: conversations of this browser, one or two columns of what is said, and the field for what is asked next.

import { key, onKeys, readModels } from "../frame/api.js";
import { announce, h, quietly, toast } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { plural } from "../frame/format.js";
import { go, href, ROOT } from "../frame/router.js";
import { ask, bodyOf, isRunning, stop } from "../chat/asking.js";
import { download, listView } from "../chat/list.js";
import { copyText } from "../chat/markdown.js";
import { body, changed, remember, remembered } from "../chat/options.js";
import { askOptions } from "../chat/settings.js";
import { asCurl, asJson, asMarkdown, fileName } from "../chat/share.js";
import * as store from "../chat/store.js";
import { add, attachment, end, newConversation, openCalls, path, titleOf } from "../chat/tree.js";
import { viewOf } from "../chat/turns.js";
import { welcome } from "../chat/welcome.js";

const SAVE_EACH_MS = 1500;
const open = new Map(); // conversations in memory by id: the one that is shown, and those whose answers come
let models = []; // names
let plain = new Set(); // those without a chat template
let shown = null; // the page while it is mounted

export function mount(view, { path: address, signal }) {
  const page = new Page(view, signal);
  shown = page;
  signal.addEventListener("abort", () => (shown = shown === page ? null : shown));
  page.show(address[0] ?? "");
  return { update: ({ path: next }) => page.show(next[0] ?? "") };
}

class Page {
  constructor(view, signal) {
    this.signal = signal;
    this.list = listView({
      fresh: () => go(href("chat")),
      renamed: (id, title) => open.has(id) && (open.get(id).title = title) && this.title(),
      removed: (id) => (!id || id === this.conversation.id) && this.forget(),
      options: remembered,
    });
    this.head = h("h2", { class: "name" });
    this.threads = h("div", { class: "threads" });
    this.prompt = h("textarea", { rows: 1, placeholder: "Ask the model something", "aria-label": "Message", enterkeyhint: "send" });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = h("button", { type: "button", class: "primary", hidden: true }, "Stop");
    this.tools = h("div", { class: "row" });
    this.compare = this.button("Compare", () => this.toggleCompare());
    this.composer = h("form", { class: "composer" }, this.prompt,
      h("div", { class: "row" }, h("span", { class: "hint" }, "Enter sends, Shift+Enter breaks the line, Esc stops, / comes back here"), this.send, this.stop));
    const menu = h("details", { class: "dropdown" }, h("summary", { class: "quiet" }, "Export"), h("div", { class: "items" },
      this.button("Copy as Markdown", () => copyText(asMarkdown(this.conversation))),
      this.button("Download Markdown", () => download(asMarkdown(this.conversation), this.file("md"), "text/markdown")),
      this.button("Download JSON", () => download(asJson([this.conversation]), this.file("json"), "application/json"))));
    menu.addEventListener("click", (event) => event.target.closest("button") && (menu.open = false));
    const chats = this.button("Chats", () => view.classList.toggle("listing"), { class: "chats" });
    view.append(this.list.element, h("section", { class: "conversation" }, h("header", { class: "topbar" }, chats, this.head, this.tools, this.compare, menu), this.threads, this.composer));
    this.list.element.addEventListener("click", (event) => event.target.closest("a, .primary") && view.classList.remove("listing"));
    this.listen(view);
  }

  listen(view) {
    const { signal } = this;
    this.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.composer.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.stopAll());
    document.addEventListener("keydown", (event) => {
      if (document.querySelector("dialog[open]") || event.defaultPrevented) return;
      if (event.key === "Escape") {
        view.classList.remove("listing");
        this.stopAll();
      } else if (event.key === "/" && !event.target.closest("input, textarea, select") && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        this.prompt.focus();
      }
    }, { signal });
    document.addEventListener("click", (event) => {
      for (const menu of view.querySelectorAll("details.dropdown[open]")) if (!menu.contains(event.target)) menu.open = false;
    }, { signal });
    onKeys(() => this.readModels(), { signal });
    on("fleet", ({ models: heard }) => heard && this.takeModels(heard.filter((one) => !one.makes).map((one) => one.name)), { signal });
    this.readModels();
  }

  button(words, act, more = {}) {
    const made = quietly(more, words);
    made.addEventListener("click", act);
    return made;
  }

  file(kind) {
    return fileName(titleOf(this.conversation), kind);
  }

  // -- which conversation --

  async show(id) {
    const mine = (this.showing = {});
    let conversation = open.get(id);
    if (!conversation && id) {
      const kept = await store.load(id).catch(() => null);
      if (mine !== this.showing) return undefined;
      if (!kept) {
        toast("This browser has no such chat.", "error");
        return go(href("chat"), { replace: true });
      }
      conversation = kept;
      for (const node of Object.values(kept.nodes)) if (node.role === "assistant" && !node.finish && !node.error) node.stopped = true;
    }
    this.drop();
    this.conversation = conversation ?? newConversation(remembered());
    open.set(this.conversation.id, this.conversation);
    this.draw({ down: true });
    this.list.refresh(id);
    if (matchMedia("(pointer: fine)").matches) this.prompt.focus({ preventScroll: true });
    return undefined;
  }

  // Out of memory, unless its answer still comes.
  drop() {
    if (this.conversation && !running(this.conversation)) open.delete(this.conversation.id);
  }

  forget() {
    for (const node of Object.values(this.conversation.nodes)) stop(node);
    this.conversation.forgotten = true;
    go(href("chat"));
    if (!location.pathname.split("/chat/")[1]) this.show("");
  }

  // -- drawing --

  draw({ down = false } = {}) {
    const { lanes } = this.conversation;
    this.lanes = lanes.map((lane, index) => new Lane(this, lane, index));
    this.threads.replaceChildren(...this.lanes.map((lane) => lane.element));
    this.threads.classList.toggle("two", lanes.length > 1);
    this.tools.replaceChildren(...(lanes.length > 1 ? [] : this.lanes[0].tools));
    this.compare.setAttribute("aria-pressed", String(lanes.length > 1));
    this.title();
    this.state();
    for (const lane of this.lanes) lane.draw({ down });
  }

  title() {
    this.head.textContent = titleOf(this.conversation);
  }

  // What the composer offers now.
  state() {
    const runs = running(this.conversation);
    this.send.hidden = runs;
    this.stop.hidden = !runs;
    const [call] = this.conversation.lanes.flatMap((lane) => openCalls(this.conversation, lane.head));
    this.prompt.placeholder = call && !runs ? `What came of ${call.name}?` : "Ask the model something";
  }

  takeModels(names) {
    if (!names.length || String(names) === String(models)) return;
    models = names;
    this.lanes?.forEach((lane) => lane.pick());
  }

  async readModels() {
    try {
      const listed = await readModels();
      plain = new Set(listed.filter((one) => !one.capabilities.includes("chat")).map((one) => one.id));
      this.takeModels(listed.map((one) => one.id));
      this.lanes?.forEach((lane) => lane.pick());
    } catch {
      // the next question says why
    }
  }

  // -- asking --

  ask(words) {
    const { conversation } = this;
    if (!words.trim() || running(conversation)) return;
    if (!this.isAskable()) return;
    const first = !Object.keys(conversation.nodes).length;
    this.prompt.value = "";
    const asked = []; // [lane, parent of its answer, where it went on]
    for (const lane of conversation.lanes) {
      const calls = openCalls(conversation, lane.head);
      let parent = attachment(conversation, lane.head);
      if (calls.length) for (const call of calls) parent = add(conversation, parent, { role: "tool", call: call.id, name: call.name, content: words }).id;
      else {
        const same = asked.find(([, , from]) => from === parent); // both columns are at the same place
        const from = parent;
        parent = same ? same[1] : add(conversation, parent, { role: "user", content: words }).id;
        asked.push([lane, parent, from]);
        continue;
      }
      asked.push([lane, parent, ""]);
    }
    for (const [lane, parent] of asked) this.answer(lane, parent);
    this.draw({ down: true });
    if (first) history.replaceState(history.state, "", href("chat", conversation.id));
    this.keep(conversation);
  }

  // Ask an example; what it needs of the settings holds for this chat alone, and what somebody chose stays.
  begin(words, settings) {
    for (const lane of this.conversation.lanes) {
      const missing = Object.entries(settings).filter(([name]) => !lane.options[name]?.trim());
      lane.options = { ...lane.options, ...Object.fromEntries(missing) };
    }
    this.lanes.forEach((lane) => lane.pick());
    this.ask(words);
  }

  // Whether the settings make a request; else they are complained about, and what was typed stays.
  isAskable() {
    try {
      for (const lane of this.conversation.lanes) body({ ...lane.options, model: modelOf(lane.options) }, []);
      return true;
    } catch (error) {
      toast(error.message, "error");
      return false;
    }
  }

  // Have an answer behind the node `parent`, in a column.
  answer(lane, parent) {
    const { conversation } = this;
    const options = { ...lane.options, model: modelOf(lane.options) };
    const node = add(conversation, parent, { role: "assistant", content: "", reasoning: "", calls: [], model: options.model, measured: {} });
    lane.head = node.id;
    this.run(conversation, node, options);
  }

  async run(conversation, node, options) {
    if (!options.model) {
      await this.readModels();
      options.model = node.model = modelOf(options);
    }
    let asked;
    try {
      asked = bodyOf(conversation, node, options);
    } catch (error) {
      node.error = error.message;
      return changedNow(conversation, node);
    }
    let saved = Date.now();
    await ask(conversation, node, asked, () => {
      redraw(conversation, node);
      if (isRunning(node) && Date.now() - saved > SAVE_EACH_MS) {
        saved = Date.now();
        keep(conversation);
      }
    });
    return changedNow(conversation, node);
  }

  stopAll() {
    for (const node of Object.values(this.conversation.nodes)) stop(node);
  }

  async keep(conversation) {
    await keep(conversation);
  }

  toggleCompare() {
    const { lanes } = this.conversation;
    if (lanes.length > 1) lanes.pop();
    else lanes.push({ head: lanes[0].head, options: { ...lanes[0].options } });
    this.draw({ down: true });
    if (Object.keys(this.conversation.nodes).length) keep(this.conversation);
  }

  async settings(lane, index) {
    const many = this.conversation.lanes.length > 1;
    const chosen = await askOptions(lane.options, many ? `Settings of column ${"AB"[index]}` : "Settings");
    if (chosen) this.setOptions(lane, chosen);
  }

  setOptions(lane, options) {
    lane.options = options;
    if (lane === this.conversation.lanes[0]) remember(options);
    this.lanes.forEach((one) => one.pick());
    if (Object.keys(this.conversation.nodes).length) keep(this.conversation);
  }
}

// A column: its model, its settings, and its branch of the conversation.
class Lane {
  constructor(page, lane, index) {
    this.page = page;
    this.lane = lane;
    this.views = new Map(); // node's id -> view
    this.model = h("select", { "aria-label": "Model" });
    this.more = page.button("Settings", () => page.settings(this.lane, index));
    this.turns = h("div", { class: "turns" });
    this.empty = welcome((question, settings) => page.begin(question, settings));
    this.continues = h("p", { class: "hint", role: "status", hidden: true }, "This model has no chat template: it continues text, at /v1/completions, and can't chat.");
    this.empty.append(this.continues);
    this.log = h("div", { class: "scroller", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: 0 }, this.empty, this.turns);
    const keeps = page.conversation.lanes.length > 1 ? page.button("Keep this one", () => this.keepOnly()) : null;
    this.tools = [this.model, this.more]; // above the column, or with the title where it is the only one
    this.element = h("section", { class: "thread", "aria-label": keeps ? `Column ${"AB"[index]}` : "Chat" }, keeps ? h("div", { class: "row" }, this.tools, keeps) : null, this.log);
    this.model.addEventListener("change", () => page.setOptions(lane, { ...lane.options, model: this.model.value }));
    this.follows = true;
    this.log.addEventListener("scroll", () => (this.follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60), { passive: true });
    this.pick();
  }

  pick() {
    const chosen = modelOf(this.lane.options);
    const names = models.length ? models : [chosen || ""];
    this.model.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === chosen }, name || "the first model")));
    this.model.value = chosen;
    this.continues.hidden = !plain.has(chosen);
    this.empty.querySelector(".first").hidden = plain.has(chosen);
    const number = changed(this.lane.options);
    this.more.textContent = number ? `Settings (${number})` : "Settings";
  }

  draw({ down = false } = {}) {
    const { conversation } = this.page;
    const nodes = path(conversation, this.lane.head);
    const views = nodes.map((node) => this.views.get(node.id) ?? viewOf(conversation, node, this.acts()));
    this.views = new Map(nodes.map((node, index) => [node.id, views[index]]));
    this.turns.replaceChildren(...views.map((view) => view.element));
    this.empty.hidden = nodes.length > 0;
    for (const view of views) view.update();
    if (down) this.follows = true;
    this.down();
  }

  update(node) {
    this.views.get(node.id)?.update();
    this.down();
  }

  down() {
    if (this.follows) this.log.scrollTop = this.log.scrollHeight;
  }

  keepOnly() {
    this.page.conversation.lanes = [this.lane];
    this.page.draw({ down: true });
    keep(this.page.conversation);
  }

  acts() {
    const { page, lane } = this;
    const { conversation } = page;
    const change = (head) => {
      lane.head = head;
      this.draw();
      page.state();
      page.keep(conversation);
    };
    const again = (parent) => {
      if (running(conversation) || !page.isAskable()) return;
      page.answer(lane, parent);
      this.draw({ down: true });
      page.state();
      page.keep(conversation);
    };
    return {
      namesModels: () => models.length > 1,
      branch: (node) => change(end(conversation, node)),
      regenerate: (node) => again(node.parent),
      editAsked: (node, content) => again(add(conversation, node.parent, { role: "user", content }).id),
      editAnswer: (node, content) => change(add(conversation, node.parent, { ...structuredClone(node), id: undefined, content, measured: undefined, request: "", error: undefined, stopped: undefined }).id),
      cut: (node) => change(node.parent && conversation.nodes[node.parent].role === "user" ? conversation.nodes[node.parent].parent : node.parent),
      waitsForResults: (node) => lane.head === node.id && !node.stopped && !node.error,
      results: (node, given) => {
        let parent = node.id;
        node.calls.forEach((call, index) => (parent = add(conversation, parent, { role: "tool", call: call.id, name: call.name, content: given[index] }).id));
        again(parent);
      },
      curl: (node) => {
        try {
          copyText(asCurl(new URL("v1/chat/completions", ROOT).href, bodyOf(conversation, node, { ...lane.options, model: node.model || modelOf(lane.options) }), Boolean(key("api"))), "Copied as curl.");
        } catch (error) {
          toast(error.message, "error");
        }
      },
    };
  }
}

const running = (conversation) => Object.values(conversation.nodes).some(isRunning);
const modelOf = (options) => (models.includes(options.model) || !models.length ? options.model : models[0]) ?? "";

// A node changed: draw it with the next picture, however many words came meanwhile. What takes long to draw is drawn less often.
const waiting = new Map(); // node's id -> whether it changed again
const IDLE_SHARE = 4;
function redraw(conversation, node) {
  if (waiting.has(node.id)) return void waiting.set(node.id, true);
  waiting.set(node.id, false);
  requestAnimationFrame(() => {
    const began = performance.now();
    if (shown?.conversation === conversation) for (const lane of shown.lanes) lane.update(node);
    setTimeout(() => {
      const changed = waiting.get(node.id);
      waiting.delete(node.id);
      if (changed) redraw(conversation, node);
    }, IDLE_SHARE * (performance.now() - began));
  });
}

// The answer is over.
function changedNow(conversation, node) {
  if (shown?.conversation === conversation) {
    for (const lane of shown.lanes) lane.update(node);
    shown.state();
    if (!node.error && !node.stopped) announce(`Answered with ${plural(node.measured?.completion_tokens ?? 0, "token")}: ${node.content.slice(0, 2000)}`);
    if (document.activeElement === document.body && matchMedia("(pointer: fine)").matches) shown.prompt.focus({ preventScroll: true });
  } else if (!running(conversation)) open.delete(conversation.id);
  return keep(conversation);
}

async function keep(conversation) {
  if (conversation.forgotten) return;
  try {
    const gone = await store.save(conversation, titleOf(conversation));
    if (gone.length) toast(`The oldest chats had to go: ${gone.join(", ").slice(0, 100)}`);
  } catch (error) {
    toast(`This chat isn't kept: ${error.message}`, "error");
  }
  if (shown) {
    if (shown.conversation === conversation) shown.title();
    await shown.list.refresh(shown.conversation.id);
  }
}
