// The dialog with what an answer is asked with.

import { h, opened, quietly } from "../frame/dom.js";
import { EXAMPLES, FIELDS, GROUPS, NONE } from "./options.js";

// `options` as the person left them, or null when nothing was changed.
export function askOptions(options, title) {
  const made = new Map(FIELDS.map(([name, label, kind, rule, hint]) => [name, field(name, label, kind, rule, hint, options[name] ?? "")]));
  const groups = GROUPS.map(([title, names]) => h("fieldset", { class: "group" }, h("legend", {}, title), h("div", { class: "fields" }, names.map((name) => made.get(name)))));
  const reset = h("button", { type: "button" }, "Reset");
  const dialog = h("dialog", { class: "settings", "aria-label": title },
    h("form", { method: "dialog" }, h("h2", {}, title), groups,
      h("div", { class: "row foot-row" }, h("button", { type: "submit", class: "primary", value: "apply" }, "Apply"), reset, h("button", { type: "submit", value: "no", formnovalidate: true }, "Cancel"))));
  const form = dialog.querySelector("form");
  reset.addEventListener("click", () => FIELDS.forEach(([name]) => (form.elements[name].value = NONE[name] ?? "")));
  const chosen = () => Object.fromEntries(FIELDS.map(([name]) => [name, form.elements[name].value]));
  return opened(dialog).then((value) => (value === "apply" ? { ...options, ...chosen() } : null));
}

function field(name, label, kind, rule, hint, value) {
  const long = ["text", "json", "lines"].includes(kind);
  const made = kind === "choice" ? h("select", { name }, rule.choices.map(([one, said]) => h("option", { value: one }, said)))
    : long ? h("textarea", { name, rows: kind === "text" ? 3 : 2, spellcheck: kind === "text", placeholder: hint, class: kind === "json" ? "code" : "" })
      : h("input", { name, type: "number", inputmode: "decimal", min: rule.min, max: rule.max, step: rule.step ? "any" : 1, placeholder: hint });
  made.value = value;
  const labelled = h("label", { class: long ? "wide" : "" }, label, " ", made);
  return EXAMPLES[name] ? h("div", { class: "wide" }, labelled, example(name, made, EXAMPLES[name])) : labelled;
}

// A button that fills an empty field, and puts an example behind what is there already otherwise.
function example(name, field, text) {
  const button = quietly({ "aria-label": `Insert an example of ${name}` }, "Insert an example");
  button.addEventListener("click", () => {
    field.value = field.value.trim() ? `${field.value.trimEnd()}\n${text}` : text;
    field.rows = Math.min(14, field.value.split("\n").length);
    field.focus();
  });
  return button;
}
