// The playground: a conversation, and for each answer where its time went.

import { ApiError, chat, readModels, readRequest } from "../frame/api.js";
import { announce, byId, h, toast } from "../frame/dom.js";
import { plural } from "../frame/format.js";
import { requestView } from "../frame/waterfall.js";

const DRAW_EVERY_MS = 100;
let log = null; // the conversation's element, kept from page to page
const conversation = []; // messages: what the model is told next time
let calls = []; // functions that the last answer wants called: what is typed next are their results
let running = null; // AbortController of the answer that comes

export function mount(view) {
  view.append(byId("old-chat").content.cloneNode(true));
  const old = log;
  if (old) byId("chat").replaceWith(old);
  log = byId("chat");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    const prompt = byId("prompt").value.trim();
    if (!prompt) return;
    try {
      ask(prompt, { max_tokens: number("max-tokens"), temperature: number("temperature"), ...functions(), ...thinking() });
    } catch (error) {
      toast(error.message, "error"); // an option can't be: the prompt stays where it is
    }
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", () => {
    running?.abort();
    conversation.length = 0;
    calls = [];
    byId("chat").replaceChildren();
    byId("prompt").focus();
  });
}

function ask(prompt, options) {
  byId("prompt").value = "";
  const answer = openAnswer(prompt);
  running = new AbortController();
  setRunning(true);
  return converse(answer, prompt, options);
}

async function converse(answer, prompt, options) {
  const asked = calls.length ? calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: prompt })) : [{ role: "user", content: prompt }];
  try {
    await stream(answer, [...conversation, ...asked], options, running.signal);
    calls = answer.calls;
    conversation.push(...asked, { role: "assistant", content: answer.text, ...(calls.length ? { tool_calls: calls } : {}) });
    if (byId("prompt")) byId("prompt").placeholder = calls.length ? `What came of ${calls[0].function.name}?` : "Ask the model something";
    announce(`Answered with ${plural(answer.measured.completion_tokens, "token")}: ${answer.text}`);
  } catch (error) {
    if (error.name === "AbortError") answer.say("stopped");
    else answer.say(error instanceof ApiError ? error.message : "the answer could not be read", true);
  } finally {
    running = null;
    setRunning(false);
    answer.draw();
  }
  await explain(answer);
}

function setRunning(is) {
  if (!byId("send")) return; // another page is shown
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  if (!is && document.activeElement === document.body) byId("prompt").focus();
}

async function stream(answer, messages, options, signal) {
  const system = byId("system").value.trim();
  const [model] = await readModels();
  const body = {
    model: model.id,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    ...options,
    stream: true,
    stream_options: { include_usage: true },
  };
  answer.began = performance.now();
  for await (const chunk of chat(body, signal)) answer.take(chunk);
}

function functions() {
  const text = byId("functions").value.trim();
  if (!text) return {};
  try {
    return { tools: JSON.parse(text) };
  } catch (error) {
    throw new ApiError(0, `Functions: ${error.message}`);
  }
}

function thinking() {
  return byId("think").checked ? { chat_template_kwargs: { enable_thinking: true } } : {};
}

function number(id) {
  const field = byId(id);
  if (!field.checkValidity() || field.value === "") throw new ApiError(0, `${field.labels[0].firstChild.data.trim()}: ${field.validationMessage || "a number is needed"}`);
  return field.valueAsNumber;
}

// What the gateway knows of it, once it is over; without the right to read that, what was measured here stays.
async function explain(answer) {
  if (!answer.id) return;
  try {
    const [detail] = await readRequest(answer.id);
    answer.show(requestView(detail), "measured by the gateway");
  } catch (error) {
    if (error.status === 401) answer.show(null, "measured here; the admin key shows the gateway's own");
  }
}

// The article of one exchange, and what to do with it.
function openAnswer(prompt) {
  const text = h("p", { class: "text" });
  const note = h("p", { class: "note" });
  const thoughts = h("p", { class: "text" });
  const folded = h("details", { class: "times" }, h("summary", {}, "Thoughts"), thoughts);
  const wanted = h("div", {});
  folded.hidden = true;
  const view = h("div", {});
  const source = h("span", { class: "hint" }, "measured here");
  const times = h("details", { class: "times", open: true }, h("summary", {}, "Time line ", source), view);
  times.hidden = true;
  log.append(h("article", { class: "turn user" }, h("h3", { class: "hidden" }, "You"), h("p", { class: "text" }, prompt)),
    h("article", { class: "turn model" }, h("h3", { class: "hidden" }, "Model"), folded, text, wanted, note, times));
  const follow = () => (log.scrollTop = log.scrollHeight);
  const measured = { ttft_ms: null, total_ms: 0, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0, frame_ms: [] };
  let drawn = 0;
  follow();
  const answer = {
    id: "",
    text: "",
    calls: [], // as they are sent back in `tool_calls`
    began: 0,
    measured,
    take(chunk) {
      answer.id ||= chunk.id;
      const now = performance.now() - answer.began;
      const delta = chunk.choices[0]?.delta ?? {};
      const words = delta.content;
      for (const part of delta.tool_calls ?? []) answer.call(part);
      if (delta.reasoning_content) {
        folded.hidden = false;
        thoughts.append(delta.reasoning_content);
      }
      if (words || delta.reasoning_content || delta.tool_calls) {
        measured.ttft_ms ??= now;
        measured.frame_ms.push(now);
        answer.text += words ?? "";
        text.append(words ?? "");
        const stays = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
        if (stays) follow();
      }
      measured.total_ms = now;
      measured.completion_tokens = chunk.usage?.completion_tokens ?? measured.frame_ms.length;
      if (chunk.usage) {
        measured.prompt_tokens = chunk.usage.prompt_tokens;
        measured.cached_tokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      }
      if (chunk.choices[0]?.finish_reason === "length") answer.say("cut at the longest answer");
      if (now - drawn > DRAW_EVERY_MS) {
        drawn = now;
        answer.draw();
      }
    },
    call({ index, id, function: part }) {
      const call = (answer.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id += id ?? "";
      call.function.name += part?.name ?? "";
      call.function.arguments += part?.arguments ?? "";
      const drawings = answer.calls.map((one) => h("details", { class: "times" }, h("summary", {}, `Calls ${one.function.name}`), h("code", {}, one.function.arguments)));
      wanted.replaceChildren(...drawings);
    },
    draw() {
      if (measured.frame_ms.length) answer.show(requestView(measured));
    },
    show(drawing, from) {
      const stays = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
      if (drawing) view.replaceChildren(drawing);
      if (from) source.textContent = from;
      times.hidden = !view.firstChild;
      if (stays) follow();
    },
    say(words, isError = false) {
      note.textContent = words;
      note.classList.toggle("error", isError);
      if (isError) toast(words, "error");
    },
  };
  return answer;
}
