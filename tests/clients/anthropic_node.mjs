// Anthropic's SDK for TypeScript, and Vercel's AI SDK with Anthropic's provider, by their own documentation.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import Anthropic from "@anthropic-ai/sdk";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { baseURL, DESCRIPTION, model, PARAMETERS, PERSON, run, SUNNY, WEATHER } from "./cases.mjs";

const client = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const provided = createAnthropic({ baseURL, apiKey: "none" })(model);
const said = (content) => [{ role: "user", content }];
const TOOLS = [{ name: "get_weather", description: DESCRIPTION, input_schema: PARAMETERS }];
const asking = (prompt) => ({ model: provided, maxRetries: 0, maxOutputTokens: 200, prompt });
const weather = (cities) => ({
  get_weather: tool({
    description: DESCRIPTION,
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (cities.push(city), SUNNY),
  }),
});
const person = () => Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });

await run({
  "messages, whole and streamed": async () => {
    const body = { model, max_tokens: 100, messages: said("What is the capital of France?") };
    const whole = await client.messages.create(body);
    assert.match(whole.content[0].text, /Paris/);
    const streamed = await client.messages.stream(body).finalMessage();
    assert.match(streamed.content[0].text, /Paris/);
    assert.equal(streamed.stop_reason, "end_turn");
  },
  "tools, streamed, with the result in a second turn": async () => {
    const body = { model, max_tokens: 200, tools: TOOLS };
    const first = await client.messages.stream({ ...body, messages: said(WEATHER) }).finalMessage();
    const call = first.content.at(-1);
    assert.deepEqual([first.stop_reason, call.input], ["tool_use", { city: "Paris" }]);
    const result = { type: "tool_result", tool_use_id: call.id, content: JSON.stringify(SUNNY) };
    const messages = [...said(WEATHER), { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    const second = await client.messages.create({ ...body, messages });
    assert.equal(second.stop_reason, "end_turn");
  },
  "countTokens and models": async () => {
    assert((await client.messages.countTokens({ model, messages: said("Hello!"), tools: TOOLS })).input_tokens > 10);
    assert((await client.models.list()).data.some((one) => one.id === model));
  },
  "@ai-sdk/anthropic: generateText": async () => {
    assert((await generateText(asking("Hello!"))).text.length > 0);
  },
  "@ai-sdk/anthropic: a tool, streamed, and its result in a second step": async () => {
    const cities = [];
    const answer = streamText({ ...asking(WEATHER), tools: weather(cities), stopWhen: stepCountIs(3) });
    let text = "";
    for await (const part of answer.textStream) text += part;
    assert.deepEqual(cities, ["Paris"]);
    assert.equal((await answer.steps).length, 2);
    assert(text.length > 0);
    assert((await answer.totalUsage).outputTokens > 0);
  },
  "@ai-sdk/anthropic: an object by schema": async () => {
    assert.deepEqual((await generateText({ ...asking(PERSON), output: person() })).output, { name: "Anna", age: 25 });
  },
  "@ai-sdk/anthropic: thinking": async () => {
    const thinking = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
    const answer = await generateText({ ...asking("What is 7 + 5?"), providerOptions: thinking });
    assert.match(answer.reasoningText, /add 7 and 5/);
    assert.match(answer.text, /12/);
  },
});
