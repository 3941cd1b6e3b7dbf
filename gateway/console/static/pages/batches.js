// Batches of an API key's tenant: submit a file, watch, cancel, take the results.

import { call, key, onKeys, send } from "../frame/api.js";
import { button, confirmed, h, quietly, save, section, toast } from "../frame/dom.js";
import { bytes, count, plural } from "../frame/format.js";
import { openKeys } from "../frame/keys.js";
import { fill, table } from "../frame/table.js";

const RUNS_MS = 2_000;
const RESTS_MS = 15_000;
const OVER = ["completed", "failed", "expired", "cancelled"];
const HEAD_BYTES = 1 << 20; // of a file, to look at its first line
const HEADS = ["Batch", "Status", "Progress", "Made", ["Took"], [""]];
const FILE_HEADS = ["File", ["Size"], "Made", [""]];
const ENDPOINT = "/v1/chat/completions";

const ask = (path, options = {}) => call(path, { ...options, with: key("api") });
export function mount(view, { signal }) {
  let batches = [];
  let files = [];
  let timer = 0;
  const note = h("p", { class: "note error", hidden: true });
  const rows = h("tbody", {});
  const kept = h("tbody", {});
  const input = h("input", { type: "file", accept: ".jsonl,.ndjson,.json,.txt", "aria-label": "File of requests", class: "hidden", tabindex: -1 });
  const choose = button("Submit a file", () => input.click(), { class: "primary" });
  const drop = section({ "aria-label": "Submit" }, h("div", { class: "head" }, h("h2", {}, "New batch"), choose, input),
    h("p", { class: "hint" }, "JSON lines, each {\"custom_id\", \"method\": \"POST\", \"url\", \"body\"}: choose a file, or drop it here. All lines of a file have the same url. It runs behind everything else, within 24 hours."), note);
  const filesPanel = h("details", { class: "panel files" }, h("summary", {}, "Files"), table(FILE_HEADS, kept));
  const listed = section({ "aria-label": "Batches" }, h("div", { class: "head" }, h("h2", {}, "Batches")), table(HEADS, rows));
  view.append(drop, listed, filesPanel);

  const complain = (error) => {
    note.hidden = !error;
    choose.disabled = listed.hidden = filesPanel.hidden = error?.status === 401 || error?.status === 404;
    if (!error) return note.replaceChildren();
    return note.replaceChildren(error.status === 401 ? "An API key is needed to see its tenant's batches. " : error.status === 404 ? "This gateway has no Batch API (--batch-store-mb 0)." : error.message, error.status === 401 ? button("Enter a key", () => openKeys("api")) : "");
  };

  async function refresh() {
    clearTimeout(timer);
    try {
      const [some, all] = await Promise.all([ask("v1/batches?limit=100", { signal }), filesPanel.open ? ask("v1/files", { signal }) : { data: files }]);
      batches = some.data;
      files = all.data;
      complain(null);
    } catch (error) {
      if (signal.aborted) return;
      complain(error);
    }
    draw();
    clearTimeout(timer);
    timer = setTimeout(() => (document.hidden ? (timer = setTimeout(refresh, RESTS_MS)) : refresh()), batches.some((one) => !OVER.includes(one.status)) ? RUNS_MS : RESTS_MS);
  }

  function draw() {
    fill(rows, HEADS, batches.map(row), "No batch yet.");
    fill(kept, FILE_HEADS, files.map((one) => [one.id, "", [[h("b", {}, one.filename), h("br"), h("small", {}, `${one.id}, ${one.purpose}`)], bytes(one.bytes), when(one.created_at),
      [quietly({ "data-file": one.id, "data-name": one.filename, "aria-label": `Download ${one.filename}` }, "Download"), quietly({ "data-drop": one.id, "aria-label": `Delete ${one.filename}` }, "Delete")]]]), "No file.");
  }

  const act = async (asked, said) => {
    try {
      const answer = await asked();
      if (said) toast(said);
      return answer;
    } catch (error) {
      toast(error.message, "error");
      if (error.status === 401) openKeys("api");
      return null;
    }
  };

  async function submit(file) {
    choose.disabled = true;
    choose.textContent = "Uploading …";
    await act(async () => {
      const endpoint = await endpointOf(file);
      const form = new FormData();
      form.append("purpose", "batch");
      form.append("file", file, file.name);
      const kept = await (await send("v1/files", { with: key("api"), method: "POST", body: form, signal })).json();
      await ask("v1/batches", { method: "POST", body: { input_file_id: kept.id, endpoint, completion_window: "24h", metadata: { file: file.name.slice(0, 500) } } });
    }, `${file.name} is submitted.`);
    choose.disabled = false;
    choose.textContent = "Submit a file";
    input.value = "";
    await refresh();
  }

  input.addEventListener("change", () => input.files[0] && submit(input.files[0]));
  for (const name of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files[0]) submit(event.dataTransfer.files[0]);
    });
  }
  view.addEventListener("click", async (event) => {
    const { cancel, file, name, drop: gone } = event.target.closest("button")?.dataset ?? {};
    if (cancel && (await confirmed("Cancel this batch?", "Lines that are not done are not run. What is done stays in its output file.", "Cancel the batch"))) await act(() => ask(`v1/batches/${cancel}/cancel`, { method: "POST" }), "It runs no more lines.");
    else if (file) return act(() => download(file, name));
    else if (gone && (await confirmed("Delete this file?", "It can't be brought back.", "Delete"))) await act(() => ask(`v1/files/${gone}`, { method: "DELETE" }), "The file is deleted.");
    else return undefined;
    return refresh();
  });
  filesPanel.addEventListener("toggle", refresh);
  onKeys(refresh, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  refresh();
}

const when = (unix) => new Date(unix * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });

function row(one) {
  const { total, completed, failed } = one.request_counts;
  const done = completed + failed;
  const ended = one.completed_at ?? one.failed_at ?? one.cancelled_at ?? one.expired_at;
  const name = one.metadata?.file ?? one.endpoint;
  const part = (count, kind) => h("span", { class: kind, style: { width: `${total ? (100 * count) / total : 0}%` } });
  const file = (id, words, kind) => (id ? quietly({ "data-file": id, "data-name": `${name.replace(/\.[a-z]+$/i, "")}-${kind}.jsonl` }, words) : null);
  const cancel = OVER.includes(one.status) || one.status === "cancelling" ? null : quietly({ "data-cancel": one.id, "aria-label": `Cancel ${name}` }, "Cancel");
  return [one.id, "", [
    [h("b", {}, name), h("br"), h("small", {}, [one.id, one.model, one.endpoint].filter(Boolean).join(" · "))],
    h("span", { class: "phase", "data-state": one.status }, one.status.replace("_", " ")),
    [h("div", { class: "progress" }, h("span", {}, total ? `${count(done)} of ${plural(total, "line")}` : "–", failed ? h("b", {}, `, ${count(failed)} failed`) : null),
      h("span", { class: "kvbar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": done, "aria-label": `Progress of ${name}` }, part(completed, "ok"), part(failed, "wrong"))),
    ...(one.errors?.data ?? []).slice(0, 5).map((error) => h("p", { class: "note error" }, error.line ? `line ${error.line}: ` : "", error.message))],
    when(one.created_at), ended ? took(ended - one.created_at) : "–",
    [file(one.output_file_id, "Results", "results"), file(one.error_file_id, "Errors", "errors"), cancel]]];
}

const took = (seconds) => (seconds < 120 ? `${seconds} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);

// The `url` of a file's first line.
export async function endpointOf(file) {
  const [first] = (await file.slice(0, HEAD_BYTES).text()).split("\n");
  try {
    return JSON.parse(first).url ?? ENDPOINT;
  } catch {
    return ENDPOINT; // the server says what is wrong with the line
  }
}

async function download(id, name) {
  save(await (await send(`v1/files/${encodeURIComponent(id)}/content`, { with: key("api") })).blob(), name);
}
