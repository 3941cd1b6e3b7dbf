// What an answer is asked with: the fields of the settings, and the body that they make. Pure, but for what the browser remembers.

// [name, label, kind, rule, hint]: kinds are number, whole, text, lines, json, choice, toggle.
export const FIELDS = [
  ["system", "System prompt", "text", {}, ""],
  ["max_tokens", "Longest answer, tokens", "whole", { min: 1, max: 1_000_000 }, "up to the model's context"],
  ["temperature", "Temperature", "number", { min: 0, max: 2, step: 0.1 }, "1"],
  ["top_p", "Top p", "number", { min: 0, max: 1, step: 0.05 }, "1"],
  ["top_k", "Top k", "whole", { min: -1, max: 1_000_000 }, "off"],
  ["min_p", "Min p", "number", { min: 0, max: 1, step: 0.01 }, "0"],
  ["frequency_penalty", "Frequency penalty", "number", { min: -2, max: 2, step: 0.1 }, "0"],
  ["presence_penalty", "Presence penalty", "number", { min: -2, max: 2, step: 0.1 }, "0"],
  ["repetition_penalty", "Repetition penalty", "number", { min: 0.01, max: 100, step: 0.05 }, "1"],
  ["seed", "Seed", "whole", { min: 0, max: Number.MAX_SAFE_INTEGER }, "another each time"],
  ["priority", "Priority", "whole", { min: -100, max: 100 }, "0"],
  ["stop", "Stop strings, one a line", "lines", {}, ""],
  ["thinking", "Reasoning", "choice", { choices: [["", "as the model does"], ["on", "on"], ["off", "off"]] }, ""],
  ["tool_choice", "Calls of tools", "choice", { choices: [["", "auto"], ["required", "required"], ["none", "none"]] }, ""],
  ["tools", "Tools, a JSON list", "json", { list: true }, '[{"type": "function", "function": {"name": …, "parameters": {…}}}]'],
  ["schema", "JSON schema of the answer", "json", {}, '{"type": "object", "properties": {…}}'],
  ["extra", "Further fields of the body, JSON", "json", {}, '{"logit_bias": {"42": -100}}'],
];

// The fields as the settings show them. Each is in one group.
export const GROUPS = [
  ["Instructions", ["system"]],
  ["Length and sampling", ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"]],
  ["Repetition", ["frequency_penalty", "presence_penalty", "repetition_penalty"]],
  ["Reasoning and tools", ["thinking", "tool_choice", "tools"]],
  ["Form of the answer", ["schema"]],
  ["The request", ["priority", "extra"]],
];

const pretty = (value) => JSON.stringify(value, null, 2);

// What a field may look like, to begin with.
export const EXAMPLES = {
  tools: pretty([{ type: "function", function: { name: "get_weather", description: "Get the weather of a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }]),
  schema: pretty({ type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false }),
};

export const NONE = { model: "", max_tokens: "1024" };

// The request's body for `told` messages. Throws Error that begins with the field's label.
export function body(options, told) {
  const made = { model: options.model, messages: told };
  for (const [name, label, kind, rule] of FIELDS) {
    const value = read(kind, options[name] ?? "", rule, label);
    if (value === null || name === "system") continue;
    if (name === "thinking") made.chat_template_kwargs = { enable_thinking: value === "on" };
    else if (name === "schema") made.response_format = { type: "json_schema", json_schema: { name: "answer", schema: value } };
    else if (name === "extra") Object.assign(made, value);
    else if (name !== "tool_choice" || options.tools?.trim()) made[name] = value;
  }
  return made;
}

function read(kind, given, rule, label) {
  const text = String(given).trim();
  if (!text) return null;
  if (kind === "number" || kind === "whole") {
    const value = Number(text);
    if (!Number.isFinite(value) || (kind === "whole" && !Number.isInteger(value))) throw new Error(`${label}: a ${kind === "whole" ? "whole " : ""}number is needed`);
    if (value < rule.min || value > rule.max) throw new Error(`${label}: must be from ${rule.min} to ${rule.max}`);
    return value;
  }
  if (kind === "lines") return String(given).split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (kind !== "json") return text;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
  if (Array.isArray(value) !== Boolean(rule.list) || typeof value !== "object" || value === null) throw new Error(`${label}: must be a JSON ${rule.list ? "list" : "object"}`);
  return value;
}

// How many settings differ from the defaults, for the button.
export const changed = (options) => FIELDS.filter(([name]) => String(options[name] ?? "").trim() !== (NONE[name] ?? "")).length;

const NAME = "baton.chat-options";

// The settings of a new chat: those used last.
export function remembered() {
  try {
    const stored = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    const known = ["model", ...FIELDS.map(([name]) => name)];
    return { ...NONE, ...Object.fromEntries(known.filter((name) => typeof stored[name] === "string").map((name) => [name, stored[name]])) };
  } catch {
    return { ...NONE };
  }
}

export function remember(options) {
  try {
    localStorage.setItem(NAME, JSON.stringify(options));
  } catch {
    // no room, or not allowed: the next chat has the defaults
  }
}
