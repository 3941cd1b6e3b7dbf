// Compare: how alike a few texts are by a model of vectors, or which documents answer a query best.

import { call, key, onKeys, readModels } from "../frame/api.js";
import { button, h, scroll, section } from "../frame/dom.js";
import { plural } from "../frame/format.js";
import { openKeys } from "../frame/keys.js";
import { fill, table } from "../frame/table.js";

const MANY = 24; // texts of a matrix
const RANKED = [["Rank"], ["Score"], ["Line"], "Document"];

export function mount(view, { signal }) {
  let models = [];
  const choice = h("select", { "aria-label": "Kind" }, h("option", {}, "How alike"), h("option", {}, "Rank by a query"));
  const model = h("select", { "aria-label": "Model" });
  const query = h("input", { "aria-label": "Query", value: "Where is the cat?" });
  const area = h("textarea", { rows: 6, "aria-label": "Texts, one a line" });
  const run = h("button", { class: "primary" }, "Compare");
  const note = h("p", { class: "note", role: "status" });
  const found = section({ "aria-label": "Result", hidden: true });
  const form = h("form", { class: "panel" }, h("div", { class: "row" }, choice, model), query, area, h("div", { class: "row" }, run, note));
  area.value = "The cat sat on the mat.\nA kitten rests on a rug.\nParis is the capital of France.";
  view.append(form, found);

  const ranks = () => choice.selectedIndex === 1;
  // Cross-encoders of one label rank; models of vectors do both.
  const suits = ({ capabilities, labels }) => capabilities?.includes("embedding") || (ranks() && labels?.length === 1);

  function draw() {
    query.hidden = !ranks();
    const chosen = model.value;
    model.replaceChildren(...models.filter(suits).map(({ id }) => h("option", { selected: id === chosen }, id)));
    run.disabled = model.disabled = !model.length;
    say(model.length ? "Ctrl+Enter compares, too." : "No model of vectors is served: ./baton up --model FOLDER");
  }

  function say(text, error = null) {
    note.classList.toggle("error", Boolean(error));
    note.replaceChildren(text, error?.status === 401 ? button("Enter a key", () => openKeys("api")) : "");
  }

  async function refresh() {
    try {
      models = await readModels();
      draw();
    } catch (error) {
      say(error.message, error);
    }
  }

  const ask = (path, body) => call(path, { method: "POST", body: { model: model.value, ...body }, with: key("api"), signal });

  async function compare() {
    const lines = linesOf(area.value);
    if (!ranks() && (lines.length < 2 || lines.length > MANY)) return say(`Give 2 to ${MANY} texts, one a line: these are ${lines.length}.`, {});
    run.disabled = true;
    try {
      const told = ranks() ? await ask("v1/rerank", { query: query.value, documents: lines, return_documents: false }) : await ask("v1/embeddings", { input: lines });
      found.replaceChildren(...(told.results ? ranking(told.results, lines) : likeness(told.data, lines)));
      found.hidden = false;
      say(`${plural(lines.length, "text")}, ${plural(told.usage.total_tokens, "token")}.`);
    } catch (error) {
      if (!signal.aborted) say(error.message, error);
    }
    run.disabled = false;
  }

  choice.addEventListener("change", draw);
  form.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit(run));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  onKeys(refresh, { signal });
  refresh();
}

function ranking(results, lines) {
  const body = h("tbody", {});
  fill(body, RANKED, results.map(({ index, relevance_score: score }, at) => [String(index), "", [String(at + 1), score.toFixed(4), String(index + 1), lines[index]]]), "");
  return [table(RANKED, body)];
}

function likeness(data, lines) {
  const scores = matrixOf(data.map((one) => one.embedding));
  const cell = (one, row, column) => h("td", { class: "cell num", title: `${lines[row]} / ${lines[column]}`, style: { "--heat": `${Math.round(100 * Math.max(0, one))}%` } }, one.toFixed(2));
  const head = lines.map((line, at) => h("th", { scope: "col", class: "num", title: line }, String(at + 1)));
  return [h("h2", {}, "Cosine of each two"), scroll("Matrix", h("table", {}, h("thead", {}, h("tr", {}, h("td", {}), head)),
    h("tbody", {}, scores.map((row, at) => h("tr", {}, h("th", { scope: "row", title: lines[at] }, `${at + 1}. ${lines[at]}`), row.map((one, column) => cell(one, at, column)))))))];
}

export const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

// The cosine of each two vectors, whatever their length.
export function matrixOf(vectors) {
  const lengths = vectors.map((one) => Math.hypot(...one) || 1);
  return vectors.map((a, i) => vectors.map((b, j) => a.reduce((sum, value, at) => sum + value * b[at], 0) / (lengths[i] * lengths[j])));
}
