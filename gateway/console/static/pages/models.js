// What is loaded: each model as its files and its workers say.

import { h, patch } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { bytes, count, plural } from "../frame/format.js";
import { shortName } from "../frame/names.js";
import { href } from "../frame/router.js";

export function mount(view, { signal }) {
  on("fleet", (state) => patch(view, state.models.map((model) => card(model, state))), { signal });
}

function card(model, { models, workers }) {
  const own = workers.filter((worker) => models.length === 1 || worker.model === model.name);
  return h("section", { class: "panel", "data-key": model.name, "aria-label": model.name },
    h("div", { class: "head" }, h("h2", {}, model.name), h("span", { class: "tag" }, own.length ? `on ${plural(own.length, "worker")}` : "no worker serves it")),
    h("dl", { class: "facts" }, factsOf(model, own).filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    own.length ? h("dl", { class: "facts" }, own.map((worker) => h("div", { "data-key": worker.id }, h("dt", {}, h("a", { href: href("fleet", worker.id), title: worker.id }, shortName(worker.id))),
      h("dd", {}, `${[...worker.roles].sort().reverse().join(" and ")}; KV for ${count(worker.kv_blocks * worker.block_tokens)} tokens, ${bytes(worker.kv_blocks * worker.block_bytes)}`)))) : null);
}

// [name, value] of what is known. Pure.
export function factsOf(model, workers) {
  const kinds = [...new Set(workers.map((worker) => worker.kv_dtype))].filter(Boolean).join(", ");
  const memory = workers.reduce((sum, worker) => sum + worker.kv_blocks * worker.block_bytes, 0);
  return [
    ["architecture", model.architecture || "not said by its files (a GGUF file)"],
    ["saved as", [model.dtype, model.quantised && `quantised: ${model.quantised}`].filter(Boolean).join(", ")],
    ["context", model.max_model_len ? `${count(model.max_model_len)} tokens, prompt and answer together` : ""],
    ["vocabulary", plural(model.vocab_size, "token")],
    ["KV cache", memory ? `${bytes(memory)} on ${plural(workers.length, "worker")}${kinds && `, in ${kinds}`}` : ""],
    ["chat", model.can_chat ? "yes" : "no chat template: it continues text"],
    ["tool calls", model.can_chat ? model.calls || "no format is known: they stay text" : ""],
    ["thoughts", model.can_chat ? model.reasoning || "none apart from the answer" : ""],
  ];
}
