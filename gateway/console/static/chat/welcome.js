// What an empty chat shows: what to ask first. The demo model can answer it, and so can others.

import { h } from "../frame/dom.js";
import { EXAMPLES } from "./options.js";

// [question, what it shows, settings that it needs]
const FIRST = [
  ["What is the capital of Japan?", "an answer", {}],
  ["What is 7 + 5?", "a sum", {}],
  ["What is the weather in Paris?", "a call of a tool, whose result you type", { tools: EXAMPLES.tools }],
];

// `ask(question, settings)` is called for the one that was chosen.
export function welcome(ask) {
  const choice = ([question, about, settings]) => {
    const button = h("button", { type: "button" }, h("span", { class: "question" }, question), h("small", {}, about));
    button.addEventListener("click", () => ask(question, settings));
    return button;
  };
  return h("div", { class: "welcome" }, h("p", {}, "Ask anything."), h("div", { class: "first" }, FIRST.map(choice)),
    h("p", { class: "hint" }, "Each answer has a line of figures that opens into where its time went. Chats stay in this browser."));
}
