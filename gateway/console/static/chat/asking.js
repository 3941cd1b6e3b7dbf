// One answer, as it comes: chunks become a node of the conversation. `take` is pure.

import { ApiError, chat } from "../frame/api.js";
import { body } from "./options.js";
import { messages, said } from "./tree.js";

const MAX_FRAMES = 4_000;
const running = new Map(); // node's id -> {controller, frames}

export const isRunning = (node) => running.has(node.id);
export const stop = (node) => running.get(node.id)?.controller.abort();
export const framesOf = (node) => frames.get(node) ?? [];
const frames = new WeakMap(); // node -> milliseconds at which words came, of answers of this visit

// Put a chunk's words into the node. `now`: milliseconds since it was asked. Whether it had any.
export function take(node, chunk, now) {
  node.request ||= chunk.id ?? "";
  const [choice] = chunk.choices ?? [];
  const delta = choice?.delta ?? {};
  const measured = (node.measured ??= {});
  const words = Boolean(delta.content || delta.reasoning_content || delta.tool_calls?.length);
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    const call = ((node.calls ??= [])[index] ??= { id: "", name: "", arguments: "" });
    call.id += id ?? "";
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }
  if (words) {
    measured.ttft_ms ??= now;
    if (!chunk.usage) measured.completion_tokens = (measured.completion_tokens ?? 0) + 1;
    if (delta.reasoning_content) measured.thought_ms = now;
  }
  measured.total_ms = now;
  if (choice?.finish_reason) node.finish = choice.finish_reason;
  if (chunk.usage) {
    measured.completion_tokens = chunk.usage.completion_tokens;
    measured.prompt_tokens = chunk.usage.prompt_tokens;
    measured.cached_tokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
  return words;
}

// Tokens a second behind the first one.
export function pace({ ttft_ms: first, total_ms: total, completion_tokens: tokens }) {
  return tokens > 1 && total > first ? (1000 * (tokens - 1)) / (total - first) : null;
}

// The request's body for the answer `node`: all that is before it.
export const bodyOf = (conversation, node, options) => body(options, messages(conversation, node.parent, options.system?.trim()));

// Ask; `changed()` is called for each piece, also for the last. Errors become the node's `error` and `status`.
export async function ask(conversation, node, asked, changed) {
  const controller = new AbortController();
  const arrived = [];
  running.set(node.id, { controller });
  frames.set(node, arrived);
  const began = performance.now();
  try {
    for await (const chunk of chat({ ...asked, stream: true, stream_options: { include_usage: true } }, controller.signal)) {
      const now = performance.now() - began;
      if (take(node, chunk, now) && arrived.length < MAX_FRAMES) arrived.push(now);
      changed();
    }
    node.finish ||= "stop";
  } catch (error) {
    if (error.name === "AbortError") node.stopped = true;
    else {
      node.error = error instanceof ApiError || !said(node) ? error.message : "the answer could not be read";
      if (error.status) node.status = error.status;
      if (!(error instanceof ApiError)) console.error(error);
    }
  } finally {
    running.delete(node.id);
    conversation.updated = Date.now();
    changed();
  }
}
