// The playground: a conversation, and for each answer where its time went.

import { ApiError, chat, readModels, readRequest } from "./api.js";
import { announce, byId, h, toast } from "./dom.js";
import { plural } from "./format.js";
import { requestView } from "./waterfall.js";

const DRAW_EVERY_MS = 100;
const conversation = []; // {role, content}: what the model is told next time
let running = null; // AbortController of the answer that comes

export function startChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    const prompt = byId("prompt").value.trim();
    if (!prompt) return;
    try {
      ask(prompt, { max_tokens: number("max-tokens"), temperature: number("temperature") });
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
  const asked = { role: "user", content: prompt };
  try {
    await stream(answer, [...conversation, asked], options, running.signal);
    conversation.push(asked, { role: "assistant", content: answer.text });
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
  const view = h("div", {});
  const source = h("span", { class: "hint" }, "measured here");
  const times = h("details", { class: "times", open: true }, h("summary", {}, "Time line ", source), view);
  times.hidden = true;
  const log = byId("chat");
  log.append(h("article", { class: "turn user" }, h("h3", { class: "hidden" }, "You"), h("p", { class: "text" }, prompt)),
    h("article", { class: "turn model" }, h("h3", { class: "hidden" }, "Model"), text, note, times));
  const follow = () => (log.scrollTop = log.scrollHeight);
  const measured = { ttft_ms: null, total_ms: 0, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0, frame_ms: [] };
  let drawn = 0;
  follow();
  const answer = {
    id: "",
    text: "",
    began: 0,
    measured,
    take(chunk) {
      answer.id ||= chunk.id;
      const now = performance.now() - answer.began;
      const words = chunk.choices[0]?.delta?.content;
      if (words) {
        measured.ttft_ms ??= now;
        measured.frame_ms.push(now);
        answer.text += words;
        text.append(words);
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
