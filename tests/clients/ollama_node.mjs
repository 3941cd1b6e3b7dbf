// ollama-js by its own README: chat, streams, tools, formats, generate, models, errors.

import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { baseURL, DESCRIPTION, model, PARAMETERS, PERSON, run, SUNNY, WEATHER } from "./cases.mjs";

const client = new Ollama({ host: baseURL.replace(/\/v1$/, "") });
const weather = { type: "function", function: { name: "get_weather", description: DESCRIPTION, parameters: PARAMETERS } };
const options = { temperature: 0 };
const asking = (content) => ({ model, options, messages: [{ role: "user", content }] });

await run({
  "chat, whole and streamed": async () => {
    const whole = await client.chat(asking("Hello!"));
    let text = "";
    let last;
    for await (const part of await client.chat({ ...asking("Hello!"), stream: true })) {
      text += part.message.content;
      last = part;
    }
    assert(text.length > 0);
    assert.equal(text, whole.message.content);
    assert.deepEqual([last.done, last.done_reason, last.eval_count], [true, "stop", whole.eval_count]);
    assert(last.total_duration >= last.eval_duration);
  },
  "tools, with the result in a second turn": async () => {
    const asked = { ...asking(WEATHER), tools: [weather] };
    const { message } = await client.chat(asked);
    const [call] = message.tool_calls;
    assert.deepEqual([call.function.name, call.function.arguments], ["get_weather", { city: "Paris" }]);
    const result = { role: "tool", tool_name: "get_weather", content: JSON.stringify(SUNNY) };
    const second = await client.chat({ ...asked, messages: [...asked.messages, message, result] });
    assert(second.message.content.length > 0);
  },
  "tools, streamed": async () => {
    const calls = [];
    for await (const part of await client.chat({ ...asking(WEATHER), tools: [weather], stream: true })) {
      calls.push(...(part.message.tool_calls ?? []));
    }
    assert.deepEqual(calls.map((call) => call.function.arguments), [{ city: "Paris" }]);
  },
  "format: a schema": async () => {
    const properties = { name: { type: "string" }, age: { type: "integer" } };
    const format = { type: "object", properties, required: ["name", "age"] };
    const { message } = await client.chat({ ...asking(PERSON), format });
    assert.deepEqual(JSON.parse(message.content), { name: "Anna", age: 25 });
  },
  "generate, whole and streamed": async () => {
    const whole = await client.generate({ model, options, prompt: "Hello!" });
    let text = "";
    for await (const part of await client.generate({ model, options, prompt: "Hello!", stream: true })) {
      text += part.response;
    }
    assert.equal(text, whole.response);
    assert(whole.context.length > 0);
  },
  "list, ps, show, pull, version": async () => {
    const [listed] = (await client.list()).models;
    assert.equal(listed.name.replace(":latest", ""), model);
    assert.equal((await client.ps()).models[0].name, listed.name);
    const shown = await client.show({ model: listed.name });
    assert(shown.capabilities.includes("tools"));
    assert((await client.pull({ model })).status === "success");
    assert((await client.version()).version);
  },
  "an aborted stream": async () => {
    const stream = await client.chat({ ...asking("Count to one hundred."), stream: true });
    await assert.rejects(async () => {
      for await (const part of stream) {
        if (part) stream.abort();
      }
    }, { name: "AbortError" });
  },
  "an error is a text": async () => {
    await assert.rejects(client.chat({ ...asking("Hello!"), model: "no-such" }), (error) => {
      assert.equal(error.status_code, 404);
      assert.match(error.message, /^model not found: /);
      return true;
    });
    await assert.rejects(client.embed({ model, input: "Hello!" }), { message: /does not support embeddings/ });
    await assert.rejects(client.delete({ model }), { message: /models come and go/ });
  },
});
