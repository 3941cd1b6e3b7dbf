// What all gateways do now.

import { h, patch } from "../frame/dom.js";
import { on } from "../frame/feed.js";
import { count, ms, plural, seconds, share } from "../frame/format.js";

export function mount(view, { signal }) {
  const tiles = h("dl", { class: "tiles" });
  view.append(tiles);
  on("*", (state) => state.workers && state.latencies && patch(tiles, tilesOf(state)), { signal });
}

const sum = (entries, name) => entries.reduce((all, entry) => all + (entry[name] ?? 0), 0);

function tilesOf({ gateways, workers, latencies, levels, waiting, in_flight }) {
  const window = gateways[0]?.window_s ?? 0;
  const waits = Object.values(waiting);
  const blocks = sum(workers, "kv_blocks");
  const [ttftMet, ttftAll, tpotMet, tpotAll] = ["ttft_met", "ttft_count", "tpot_met", "tpot_count"].map((name) => sum(gateways, name));
  const level = (met, all) => (!all ? "" : met / all >= 0.99 ? "good" : met / all >= 0.9 ? "warn" : "bad");
  const tiles = [
    ["TTFT in time", share(ttftMet, ttftAll), `of ${count(ttftAll)} in ${seconds(window)}, ≤ ${seconds(levels.ttft_s)}`, ttftMet, ttftAll, level(ttftMet, ttftAll)],
    ["TPOT in time", share(tpotMet, tpotAll), `of ${plural(tpotAll, "sample")}, ≤ ${ms(levels.tpot_s * 1000)}`, tpotMet, tpotAll, level(tpotMet, tpotAll)],
    ["TTFT", ms(latencies.ttft_p50_ms), `95 % within ${ms(latencies.ttft_p95_ms)}`],
    ["TPOT", ms(latencies.tpot_p50_ms), `median of ${count(latencies.ended)} in a minute`],
    ["In flight", count(in_flight), `${count(sum(waits, "requests"))} waiting, ${count(sum(waits, "tokens"))} tok`],
    ["Prompts cached", share(latencies.cached_tokens, latencies.prompt_tokens), `of ${count(latencies.prompt_tokens)} tok in a minute`, latencies.cached_tokens, latencies.prompt_tokens],
    ["KV in use", share(sum(workers, "kv_used") + sum(workers, "kv_held"), blocks), `${count(sum(workers, "kv_held"))} of ${plural(blocks, "block")} held`, sum(workers, "kv_used") + sum(workers, "kv_held"), blocks],
  ];
  return tiles.map(([name, value, note, part, whole, kind]) => h("div", { class: `tile ${kind ?? ""}`, "data-key": name },
    h("dt", {}, name), h("dd", { class: "value" }, value), h("dd", { class: "hint" }, note),
    whole === undefined ? null : h("dd", { class: "meter", "aria-hidden": "true" }, h("span", { style: { width: `${whole ? (100 * part) / whole : 0}%` } }))));
}
