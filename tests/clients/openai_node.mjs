// openai-node by its own documentation: chat, tools, its helpers for streams and schemas, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { baseURL, DESCRIPTION, model, PARAMETERS, PERSON, run, SUNNY, WEATHER } from "./cases.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const weather = { type: "function", function: { name: "get_weather", description: DESCRIPTION, parameters: PARAMETERS } };
const asking = (content) => ({ model, temperature: 0, messages: [{ role: "user", content }] });
const completions = client.chat.completions;

await run({
  "chat, whole and streamed": async () => {
    const whole = await completions.create(asking("Hello!"));
    let text = "";
    let usage;
    for await (const chunk of await completions.create({
      ...asking("Hello!"), stream: true, stream_options: { include_usage: true },
    })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert(text.length > 0);
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  "tools, with the result in a second turn": async () => {
    const asked = { ...asking(WEATHER), tools: [weather] };
    const { message, finish_reason } = (await completions.create(asked)).choices[0];
    const [call] = message.tool_calls;
    assert.equal(finish_reason, "tool_calls");
    assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Paris" }]);
    const result = { role: "tool", tool_call_id: call.id, content: JSON.stringify(SUNNY) };
    const second = await completions.create({ ...asked, messages: [...asked.messages, message, result] });
    assert(second.choices[0].message.content.length > 0);
  },
  "tools, streamed by its helper": async () => {
    const final = await completions.stream({ ...asking(WEATHER), tools: [weather] }).finalChatCompletion();
    const [call] = final.choices[0].message.tool_calls;
    assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Paris" }]);
  },
  "runTools, streamed": async () => {
    const cities = [];
    const act = ({ city }) => (cities.push(city), SUNNY);
    const tools = [{ ...weather, function: { ...weather.function, parse: JSON.parse, function: act } }];
    const text = await completions.runTools({ ...asking(WEATHER), stream: true, tools }).finalContent();
    assert.deepEqual(cities, ["Paris"]);
    assert(text.length > 0);
  },
  "parse: a zod schema": async () => {
    const schema = z.object({ name: z.string(), age: z.number().int() });
    const answer = await completions.parse({ ...asking(PERSON), response_format: zodResponseFormat(schema, "person") });
    assert.deepEqual(answer.choices[0].message.parsed, { name: "Anna", age: 25 });
  },
  "a prompt that is too long is a context error": async () => {
    const isTold = (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded";
    await assert.rejects(completions.create(asking("word ".repeat(20_000))), isTold);
  },
});
