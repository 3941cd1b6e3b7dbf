// Models: what is served and loaded, the aliases with their shares, and the files on the gateway's machine.

import { call, key, onKeys, send } from "../frame/api.js";
import { confirmed, h, pairs, patch, section, toast } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { bytes, count, plural } from "../frame/format.js";
import { unread } from "../frame/keys.js";
import { rolesOf, shortName } from "../frame/names.js";
import { href } from "../frame/router.js";
import { fill, table } from "../frame/table.js";

const AGAIN_MS = 15_000;
const ALIASES = ["Name", "Answered by", "Set"];
const FILES = ["Name", ["Size"], ["Shared with others"], "State"];

export function mount(view, { signal }) {
  const cards = h("div", { class: "view" });
  const [aliases, files] = [h("tbody", {}), h("tbody", {})];
  const aliasesPanel = panel("Aliases", "Further names, with shares of their requests: baton alias set", table(ALIASES, aliases));
  const filesPanel = panel("On this machine", "Files in the gateway's cache: baton pull, baton rm", table(FILES, files));
  const trouble = h("div", { class: "panel trouble", hidden: true });
  view.append(cards, aliasesPanel, filesPanel, trouble);
  aliasesPanel.hidden = filesPanel.hidden = true;
  on("fleet", (state) => patch(cards, state.models.map((model) => card(model, state))), { signal });

  async function refresh() {
    const asked = [["aliases", aliasesPanel, (told) => fill(aliases, ALIASES, aliasRows(told.aliases), "No alias is set.")],
      ["models", filesPanel, (told) => fill(files, FILES, fileRows(told.models), "No model is kept here.")]];
    const failed = (await Promise.all(asked.map(async ([name, its, draw]) => {
      try {
        draw(await call(`admin/${name}`, { with: key("admin"), signal }));
        its.hidden = false;
        return null;
      } catch (error) {
        its.hidden = true;
        return signal.aborted || error.status === 404 ? null : error; // a gateway that keeps none has no such path
      }
    }))).find(Boolean);
    trouble.hidden = !failed;
    if (failed) trouble.replaceChildren(...unread(failed, "Aliases and files are shown with an admin key."));
  }

  view.addEventListener("click", async (event) => {
    const { load, unload } = event.target.closest("button")?.dataset ?? {};
    if (load) await tell(load, "wake_up", {}, `${load} is loaded.`);
    else if (unload && (await confirmed(`Unload ${unload}?`, "Its next request loads it again, and waits for that.", "Unload"))) await tell(unload, "sleep", { level: 2 }, `${unload} is unloaded.`);
  });
  const timer = setInterval(() => document.hidden || refresh(), AGAIN_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  onKeys(refresh, { signal });
  refresh();
}

const panel = (name, hint, content) => section({ "aria-label": name }, h("div", { class: "head" }, h("h2", {}, name), h("p", { class: "hint" }, hint)), content);

// Loading lasts as long as it does.
async function tell(model, what, more, said) {
  try {
    await send(`${what}?${new URLSearchParams({ model, ...more })}`, { method: "POST", with: key("api") });
    toast(said);
  } catch (error) {
    toast(error.message, "error");
  }
}

function card(model, { models, workers }) {
  const own = workers.filter((worker) => models.length === 1 || worker.model === model.name);
  const [words, act] = stateOf(model, own);
  return section({ "data-key": model.name, "aria-label": model.name },
    h("div", { class: "head" }, h("h2", {}, model.name), h("span", { class: "tag" }, words),
      act && h("button", { type: "button", [`data-${act}`]: model.name, "aria-label": `${act} ${model.name}` }, act === "load" ? "Load" : "Unload")),
    pairs("facts", factsOf(model, own).filter(([, value]) => value)),
    own.length ? h("dl", { class: "facts" }, own.map((worker) => h("div", { "data-key": worker.id }, h("dt", {}, h("a", { href: href("fleet", worker.id), title: worker.id }, shortName(worker.id))),
      h("dd", {}, worker.kv_blocks ? `${rolesOf(worker, " and ")}; KV for ${count(worker.kv_blocks * worker.block_tokens)} tokens, ${bytes(worker.kv_blocks * worker.block_bytes)}` : `pool; ${count(worker.queued_tokens)} tokens wait`)))) : null);
}

// A model's state in words, and the order that it can get: "load", "unload" or "". Pure.
export function stateOf({ hosted }, workers) {
  const served = workers.length ? `on ${plural(workers.length, "worker")}` : "no worker serves it";
  if (!hosted) return [served, ""];
  const words = { ready: `loaded, ${served}`, loading: "loading", unloading: "unloading", unloaded: "not loaded", parked: "asleep, its weights are in memory", failed: "could not be loaded" }[hosted.status] ?? hosted.status;
  const act = { ready: "unload", unloaded: "load", parked: "load", failed: "load" }[hosted.status] ?? "";
  return [hosted.reason ? `${words}: ${hosted.reason}` : words, act];
}

// Rows of aliases. Pure.
export const aliasRows = (aliases) => aliases.map((one) => [one.name, "", [one.name, one.shares.map(shareOf).join(", "), one.source === "made" ? "while running" : "by settings"]]);

const shareOf = (share) => {
  if (share.tenant) return `${share.model} for tenant ${share.tenant}`;
  if (share.header) return `${share.model} for ${share.header}${share.value ? `: ${share.value}` : ""}`;
  return share.percent === 100 ? share.model : `${share.model} ${share.percent} %`;
};

// Rows of kept models. Pure.
export const fileRows = (models) => models.map((one) => [one.name, "", [one.name, bytes(one.bytes), one.shared_bytes ? bytes(one.shared_bytes) : "–",
  one.is_served ? "served" : one.is_whole ? "kept" : "not whole"]]);

// Workers at hosts by role, beside those that the planner wants. Pure.
export function hostedWords({ hosted }) {
  const counts = Object.entries(hosted?.workers ?? {});
  return counts.map(([role, { running, wanted }]) => `${plural(running, `${role} worker`)}${wanted === null ? "" : `, ${count(wanted)} wanted`}`).join("; ");
}

// [name, value] of what is known. Pure.
export function factsOf(model, workers) {
  const kinds = [...new Set(workers.map((worker) => worker.kv_dtype))].filter(Boolean).join(", ");
  const memory = workers.reduce((sum, worker) => sum + worker.kv_blocks * worker.block_bytes, 0);
  return [
    ["at hosts", hostedWords(model)],
    ["architecture", model.architecture || "not said by its files (a GGUF file)"],
    ["saved as", [model.dtype, model.quantised && `quantised: ${model.quantised}`].filter(Boolean).join(", ")],
    ["context", model.max_model_len ? `${count(model.max_model_len)} tokens${model.makes ? "" : ", prompt and answer together"}` : ""],
    ...(model.makes ? [["makes", model.labels ? plural(model.labels, "score") : `vectors of ${count(model.dimensions)} features`]] : []),
    ["vocabulary", plural(model.vocab_size, "token")],
    ["KV cache", memory ? `${bytes(memory)} on ${plural(workers.length, "worker")}${kinds && `, in ${kinds}`}` : ""],
    ["chat", model.makes ? "" : model.can_chat ? "yes" : "no chat template: it continues text"],
    ["tool calls", model.can_chat ? model.calls || "no format is known: they stay text" : ""],
    ["thoughts", model.can_chat ? model.reasoning || "none apart from the answer" : ""],
  ];
}
