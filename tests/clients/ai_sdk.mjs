// Vercel's AI SDK by its own documentation, with its providers for such servers, one of them by both of its APIs.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { baseURL, DESCRIPTION, model, PERSON, run, SUNNY, WEATHER } from "./cases.mjs";

const providers = {
  "@ai-sdk/openai": createOpenAI({ baseURL, apiKey: "none" }).chat(model),
  "@ai-sdk/openai, the Responses API": createOpenAI({ baseURL, apiKey: "none" })(model),
  "@ai-sdk/openai-compatible": createOpenAICompatible({
    name: "baton", baseURL, supportsStructuredOutputs: true, includeUsage: true,
  })(model),
};
const weather = (cities) => ({
  get_weather: tool({
    description: DESCRIPTION,
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (cities.push(city), SUNNY),
  }),
});
const person = () => Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });

function casesOf(name, provided) {
  const asking = (prompt) => ({ model: provided, temperature: 0, maxRetries: 0, prompt });
  const cases = {
    "generateText": async () => {
      assert((await generateText(asking("Hello!"))).text.length > 0);
    },
    "a tool, and its result in a second step": async () => {
      const cities = [];
      const answer = await generateText({ ...asking(WEATHER), tools: weather(cities), stopWhen: stepCountIs(3) });
      assert.deepEqual(cities, ["Paris"]);
      assert.equal(answer.steps.length, 2);
      assert(answer.text.length > 0);
    },
    "the same, streamed": async () => {
      const cities = [];
      const answer = streamText({ ...asking(WEATHER), tools: weather(cities), stopWhen: stepCountIs(3) });
      let text = "";
      for await (const part of answer.textStream) text += part;
      assert.deepEqual(cities, ["Paris"]);
      assert.equal((await answer.steps).length, 2);
      assert(text.length > 0);
      assert((await answer.totalUsage).outputTokens > 0);
    },
    "an object by schema": async () => {
      const answer = await generateText({ ...asking(PERSON), output: person() });
      assert.deepEqual(answer.output, { name: "Anna", age: 25 });
    },
    "an object by schema, streamed": async () => {
      let last;
      for await (const part of streamText({ ...asking(PERSON), output: person() }).partialOutputStream) last = part;
      assert.deepEqual(last, { name: "Anna", age: 25 });
    },
  };
  return Object.entries(cases).map(([what, act]) => [`${name}: ${what}`, act]);
}

await run(Object.fromEntries(Object.entries(providers).flatMap(([name, provided]) => casesOf(name, provided))));
