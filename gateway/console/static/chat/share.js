// A conversation as text: Markdown, JSON, curl. Pure.

import { path, titleOf } from "./tree.js";

export const FORMAT = "baton-chats-1";

export const asJson = (conversations) => JSON.stringify({ format: FORMAT, conversations }, null, 1);

// The conversations of a file that `asJson` made; throws Error.
export function parsed(text) {
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`not JSON: ${error.message}`);
  }
  if (given?.format !== FORMAT || !Array.isArray(given.conversations)) throw new Error(`no chats of this console: \`format\` is not ${FORMAT}`);
  return given.conversations;
}

const NAMES = { user: "You", assistant: "Model", tool: "Tool", system: "System" };

// One branch as Markdown.
export function asMarkdown(conversation, lane = 0) {
  const { head, options } = conversation.lanes[lane];
  const parts = [`# ${titleOf(conversation)}`];
  if (options?.system) parts.push(`## System\n\n${options.system}`);
  for (const node of path(conversation, head)) {
    const who = node.role === "tool" ? `Tool ${node.name}` : node.role === "assistant" && node.model ? `Model (${node.model})` : NAMES[node.role];
    parts.push(`## ${who}`);
    if (node.reasoning) parts.push(`<details><summary>Reasoning</summary>\n\n${node.reasoning}\n\n</details>`);
    if (node.content) parts.push(node.role === "tool" ? fenced(node.content, "") : node.content);
    for (const call of node.calls ?? []) parts.push(`Calls \`${call.name}\`:\n\n${fenced(call.arguments, "json")}`);
    if (node.error) parts.push(`*Error: ${node.error}*`);
  }
  return `${parts.join("\n\n")}\n`;
}

function fenced(text, language) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((found) => found[0].length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

// A command for a shell. The key is not in it: $BATON_API_KEY is.
export function asCurl(url, body, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;
  const lines = [`curl ${quoted(url)}`, "-H 'content-type: application/json'"];
  if (hasKey) lines.push('-H "authorization: Bearer $BATON_API_KEY"');
  return [...lines, `-d ${quoted(JSON.stringify(body, null, 1))}`].join(" \\\n  ");
}

// A file's name of a title.
export const fileName = (title, kind) => `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50) || "chat"}.${kind}`;
