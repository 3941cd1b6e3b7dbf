// The dialog with what an answer is asked with.

import { h } from "../frame/dom.js";
import { FIELDS, NONE } from "./options.js";

// `options` as the person left them, or null when nothing was changed.
export function askOptions(options, title) {
  const fields = FIELDS.map(([name, label, kind, rule, hint]) => field(name, label, kind, rule, hint, options[name] ?? ""));
  const reset = h("button", { type: "button" }, "Reset");
  const dialog = h("dialog", { class: "settings", "aria-label": title },
    h("form", { method: "dialog" }, h("h2", {}, title), h("div", { class: "fields" }, fields),
      h("div", { class: "row foot-row" }, h("button", { type: "submit", class: "primary", value: "use" }, "Use"), reset, h("button", { type: "submit", value: "no", formnovalidate: true }, "Cancel"))));
  const form = dialog.querySelector("form");
  reset.addEventListener("click", () => FIELDS.forEach(([name]) => (form.elements[name].value = NONE[name] ?? "")));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    const chosen = Object.fromEntries(FIELDS.map(([name]) => [name, form.elements[name].value]));
    dialog.remove();
    resolve(dialog.returnValue === "use" ? { ...options, ...chosen } : null);
  }, { once: true }));
}

function field(name, label, kind, rule, hint, value) {
  const long = ["text", "json", "lines"].includes(kind);
  const made = kind === "choice" ? h("select", { name }, rule.choices.map(([one, said]) => h("option", { value: one }, said)))
    : long ? h("textarea", { name, rows: kind === "text" ? 3 : 2, spellcheck: kind === "text", placeholder: hint, class: kind === "json" ? "code" : "" })
      : h("input", { name, type: "number", inputmode: "decimal", min: rule.min, max: rule.max, step: rule.step ? "any" : 1, placeholder: hint });
  made.value = value;
  return h("label", { class: long ? "wide" : "" }, label, " ", made);
}
