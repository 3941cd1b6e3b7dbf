// What was said, as elements: one view for each message, which changes in place while its answer comes.

import { key, readRequest } from "../frame/api.js";
import { button, h } from "../frame/dom.js";
import { count, ms, share } from "../frame/format.js";
import { openKeys } from "../frame/keys.js";
import { href } from "../frame/router.js";
import { requestView } from "../frame/waterfall.js";
import { framesOf, isRunning, pace } from "./asking.js";
import { codeBlock, copyText, Growing, markdown } from "./markdown.js";
import { siblings } from "./tree.js";

// A view {element, update()} of a node. `acts`: what its buttons do.
export function viewOf(conversation, node, acts) {
  const view = node.role === "assistant" ? answerView(conversation, node, acts) : node.role === "tool" ? toolView(node) : askedView(conversation, node, acts);
  view.update();
  return view;
}

function branches(conversation, node, acts) {
  const all = siblings(conversation, node);
  if (all.length < 2) return null;
  const at = all.indexOf(node);
  const to = (index, sign, name) => button(sign, () => acts.branch(all[index]), { "aria-label": name, disabled: !all[index] });
  return h("span", { class: "branches" }, to(at - 1, "‹", "Earlier version"), h("span", { class: "num" }, `${at + 1}/${all.length}`), to(at + 1, "›", "Later version"));
}

function askedView(conversation, node, acts) {
  const words = markdown(node.content);
  words.classList.add("text");
  const bar = h("div", { class: "acts" });
  const element = h("article", { class: "turn user" }, h("h3", { class: "hidden" }, "You"), words, bar);
  return {
    element,
    update: () => bar.replaceChildren(...[branches(conversation, node, acts), button("Edit", () => edit(element, node.content, (text) => acts.editAsked(node, text))), button("Copy", () => copyText(node.content))].filter(Boolean)),
  };
}

function toolView(node) {
  const element = h("article", { class: "turn tool" }, h("details", { class: "fold" }, h("summary", {}, `Result of ${node.name}`), codeBlock(node.content, "json", "result")));
  return { element, update: () => {} };
}

// Words in a field in place of the view, until they are sent or not.
function edit(element, words, send) {
  if (element.querySelector(".editing")) return;
  const field = h("textarea", { rows: 3, "aria-label": "Edit" });
  field.value = words;
  const close = () => {
    form.remove();
    element.classList.remove("edited");
  };
  const form = h("form", { class: "editing" }, field, h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Send"), button("Cancel", close)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!field.value.trim()) return;
    close();
    send(field.value);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault();
    else return;
    event.stopPropagation();
    if (event.key === "Enter") form.requestSubmit();
  });
  element.classList.add("edited");
  element.append(form);
  field.focus();
}

function answerView(conversation, node, acts) {
  const thoughts = h("p", { class: "text thoughts" });
  const thinking = h("summary", {});
  const folded = h("details", { class: "fold" }, thinking, thoughts);
  const words = h("div", { class: "md" });
  const wanted = h("div", { class: "calls" });
  const note = h("p", { class: "note" });
  const bar = h("div", { class: "acts" });
  const timing = timingView(node, acts);
  const element = h("article", { class: "turn model" }, h("h3", { class: "hidden" }, "Model"), folded, words, wanted, note, h("div", { class: "under" }, timing.element, bar));
  const growing = new Growing(words);
  let thought = "";
  let drawn = "";
  const update = () => {
    const runs = isRunning(node);
    element.classList.toggle("running", runs);
    element.setAttribute("aria-busy", String(runs));
    folded.hidden = !node.reasoning;
    if (node.reasoning && node.reasoning !== thought) {
      thoughts.append(node.reasoning.slice(thought.length));
      thought = node.reasoning;
    }
    const isThinking = runs && node.reasoning && !node.content && !node.calls?.length;
    thinking.textContent = isThinking ? "Thinking …" : `Thought${node.measured?.thought_ms ? ` for ${ms(node.measured.thought_ms - (node.measured.ttft_ms ?? 0))}` : ""}`;
    growing.show(node.content, { done: !runs });
    callsView(wanted, conversation, node, acts, runs);
    timing.update(runs);
    const state = `${runs} ${node.error} ${node.stopped} ${node.finish} ${siblings(conversation, node).length}`;
    if (state === drawn) return;
    drawn = state;
    noteView(note, node, acts);
    bar.replaceChildren(...(runs ? [] : actsOf(conversation, node, acts, element)).filter(Boolean));
  };
  return { element, update };
}

function actsOf(conversation, node, acts, element) {
  const more = h("details", { class: "dropdown" }, h("summary", { class: "quiet" }, "More"),
    h("div", { class: "items" },
      button("Copy as curl", () => acts.curl(node)),
      button("Edit answer", () => edit(element, node.content, (text) => acts.editAnswer(node, text))),
      button("Delete from here", () => acts.cut(node))));
  more.addEventListener("click", (event) => event.target.closest("button") && (more.open = false));
  return [branches(conversation, node, acts), node.content ? button("Copy", () => copyText(node.content)) : null, node.error ? null : button("Regenerate", () => acts.regenerate(node)), more];
}

function noteView(note, node, acts) {
  const error = node.status === 401 ? (node.error ?? "").replace(/: send .*/, "") : node.error;
  const said = error ? `${error[0].toUpperCase()}${error.slice(1)}.`.replace(/\.\.$/, ".") : node.stopped ? "Stopped." : node.finish === "length" ? "Cut at the longest answer." : node.finish === "stop" && !node.content && !node.calls?.length ? "The model ended without an answer." : "";
  note.className = `note ${node.error ? "error" : ""}`;
  note.replaceChildren(said);
  if (node.status === 401) note.append(" ", button(key("api") ? "Enter another key" : "Enter a key", () => openKeys("api"), { class: "" }));
  if (node.error) note.append(" ", button("Try again", () => acts.regenerate(node), { class: "" }));
}

// The calls of an answer, folded, and a field for the result of each that waits for one.
function callsView(root, conversation, node, acts, runs) {
  const calls = node.calls ?? [];
  const open = acts.waitsForResults(node) && !runs && calls.length > 0;
  const state = `${calls.map((call) => call.name + call.arguments).join()} ${open}`;
  if (root.dataset.state === state) return;
  root.dataset.state = state;
  const were = [...root.querySelectorAll("details.fold")].map((one) => one.open);
  const parts = calls.filter(Boolean).map((call, index) => {
    const shown = h("details", { class: "fold" }, h("summary", {}, runs ? "Calls " : "Called ", h("code", {}, call.name || "…"), h("span", { class: "short" }, short(call.arguments))), codeBlock(pretty(call.arguments), "json", "arguments"));
    shown.open = were[index] ?? false;
    if (!open) return shown;
    const field = h("textarea", { rows: 1, placeholder: `Result of ${call.name}`, "aria-label": `Result of ${call.name}`, "data-call": index });
    return h("div", {}, shown, field);
  });
  if (open) parts.push(h("div", { class: "row" }, button(calls.length > 1 ? "Send results" : "Send result", () => acts.results(node, [...root.querySelectorAll("textarea")].map((field) => field.value)), { class: "primary" })));
  root.replaceChildren(...parts);
}

const short = (text) => (text.length > 80 ? ` ${text.slice(0, 78)}…` : ` ${text}`);

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// One line of figures, which opens into the gateway's own time line of the request.
function timingView(node, acts) {
  const line = h("summary", {});
  const inside = h("div", {});
  const element = h("details", { class: "timing" }, line, inside);
  element.addEventListener("toggle", () => element.open && explain(inside, node));
  const update = (runs) => {
    const measured = node.measured ?? {};
    element.hidden = !measured.total_ms || (measured.ttft_ms === undefined && !runs);
    const speed = pace(measured);
    const parts = [measured.ttft_ms === undefined ? "" : `TTFT ${ms(measured.ttft_ms)}`, speed ? `${speed >= 100 ? Math.round(speed) : speed.toFixed(1)} tok/s` : "",
      measured.completion_tokens ? `${count(measured.completion_tokens)} tok` : "", measured.prompt_tokens ? `${share(measured.cached_tokens, measured.prompt_tokens)} of ${count(measured.prompt_tokens)} cached` : "", acts.namesModels() ? node.model : ""];
    const said = parts.filter(Boolean).join(" · ");
    if (line.textContent !== said) line.textContent = said;
    if (!runs && element.open && !inside.firstChild) explain(inside, node);
  };
  return { element, update };
}

async function explain(inside, node) {
  if (isRunning(node) || inside.dataset.from === "gateway") return;
  const own = { ...node.measured, frame_ms: framesOf(node), cached_tokens: node.measured?.cached_tokens ?? 0 };
  const show = (detail, from, ...more) => inside.replaceChildren(requestView(detail), h("p", { class: "hint" }, from, " ", ...more));
  try {
    const [detail] = await readRequest(node.request);
    inside.dataset.from = "gateway";
    show(detail, "Measured by the gateway.", h("a", { href: href("requests", node.request) }, "All of this request"));
  } catch (error) {
    const why = error.status === 401 ? "Measured by this page; the admin key shows the gateway's own." : error.status === 404 ? "Measured by this page; the gateway has forgotten this request." : `Measured by this page: ${error.message}.`;
    const wantsKey = error.status === 401 ? [button("Enter a key", () => openKeys("admin"))] : [];
    show(own, why, ...wantsKey);
  }
}
