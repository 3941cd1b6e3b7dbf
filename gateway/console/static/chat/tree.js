// A conversation as a tree of messages: what was asked again, or edited, is another branch. Pure; times are milliseconds since 1970.
//
// A conversation: {id, title, created, updated, nodes: {id: node}, lanes: [{head, options}]}. A lane is what one column shows: the
// branch that ends at `head` (null: empty), and its options (options.js). A node: {id, parent, role, content, created}, of an assistant's also
// {reasoning, calls: [{id, name, arguments}], model, request, measured, finish, error, stopped}, of a tool's {call, name}.

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(10)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function newConversation(options, now = Date.now()) {
  return { id: newId(), title: "", created: now, updated: now, nodes: {}, lanes: [{ head: null, options }] };
}

// Add a node behind `parent` (an id, or null) and return it.
export function add(conversation, parent, node, now = Date.now()) {
  const made = { id: newId(), parent, created: now, ...node };
  conversation.nodes[made.id] = made;
  conversation.updated = now;
  return made;
}

// The nodes from the first to `head`.
export function path(conversation, head) {
  const found = [];
  for (let node = conversation.nodes[head]; node && found.length < 10_000; node = conversation.nodes[node.parent]) found.unshift(node);
  return found;
}

// The nodes that could be in the node's place, the oldest first.
export function siblings(conversation, node) {
  const found = Object.values(conversation.nodes).filter((one) => one.parent === node.parent && (one.role === "assistant") === (node.role === "assistant"));
  return found.sort((one, other) => one.created - other.created);
}

// The end of the newest branch that begins with `node`.
export function end(conversation, node) {
  for (;;) {
    const next = Object.values(conversation.nodes).filter((one) => one.parent === node.id).sort((one, other) => other.created - one.created)[0];
    if (!next) return node.id;
    node = next;
  }
}

// Where the next message goes: what failed without a word is no part of the conversation.
export function attachment(conversation, head) {
  const node = conversation.nodes[head];
  if (!node) return null;
  if (node.role === "assistant" && node.error && !said(node)) {
    let asked = conversation.nodes[node.parent];
    while (asked?.role === "tool") asked = conversation.nodes[asked.parent];
    return (asked?.role === "assistant" ? asked.id : asked?.parent) ?? null;
  }
  return head;
}

export const said = (node) => Boolean(node.content || node.reasoning || node.calls?.length);

// The calls of the last answer that nothing was answered to.
export function openCalls(conversation, head) {
  const node = conversation.nodes[attachment(conversation, head)];
  return node?.role === "assistant" && !node.stopped ? (node.calls ?? []) : [];
}

// What the model is told: messages of OpenAI's form.
export function messages(conversation, head, system = "") {
  const told = path(conversation, head).filter((node) => node.role !== "assistant" || said(node)).map((node) => {
    if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
    if (node.role !== "assistant") return { role: node.role, content: node.content };
    const calls = (node.calls ?? []).map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return { role: "assistant", content: node.content, ...(calls.length ? { tool_calls: calls } : {}) };
  });
  return system ? [{ role: "system", content: system }, ...told] : told;
}

// A title from the first thing that was asked.
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.nodes).filter((node) => node.role === "user").sort((one, other) => one.created - other.created)[0];
  const words = (first?.content ?? "").replace(/[#*`_>\s]+/g, " ").trim();
  return words.length > 60 ? `${words.slice(0, 57).trimEnd()}…` : words || "New chat";
}

// Whether all words are somewhere in it.
export function matches(text, wanted) {
  const low = text.toLowerCase();
  return wanted.toLowerCase().split(/\s+/).every((word) => low.includes(word));
}

const ROLES = ["user", "assistant", "tool", "system"];
const MAX_NODES = 5_000;

// A conversation of a file, checked field by field; throws Error with what is wrong. It gets ids of its own.
export function imported(given, options, now = Date.now()) {
  if (typeof given !== "object" || !given?.nodes || typeof given.nodes !== "object") throw new Error("no conversation: `nodes` is missing");
  const nodes = Object.values(given.nodes);
  if (nodes.length > MAX_NODES) throw new Error(`more than ${MAX_NODES} messages`);
  const ids = new Map(nodes.map((node) => [node?.id, newId()]));
  const made = { ...newConversation(options, now), title: text(given.title, 200), created: number(given.created, now), updated: number(given.updated, now) };
  for (const node of nodes) {
    if (!ROLES.includes(node?.role)) throw new Error(`a message of role ${JSON.stringify(node?.role)}`);
    const kept = { id: ids.get(node.id), parent: ids.get(node.parent) ?? null, role: node.role, content: text(node.content), created: number(node.created, now) };
    if (node.role === "tool") Object.assign(kept, { call: text(node.call, 200), name: text(node.name, 200) });
    if (node.role === "assistant") {
      kept.reasoning = text(node.reasoning);
      kept.model = text(node.model, 200);
      kept.finish = text(node.finish, 40);
      kept.calls = (Array.isArray(node.calls) ? node.calls : []).slice(0, 128).map((call) => ({ id: text(call?.id, 200), name: text(call?.name, 200), arguments: text(call?.arguments) }));
      if (node.stopped) kept.stopped = true;
      if (typeof node.error === "string") kept.error = text(node.error, 2_000);
      if (node.measured && typeof node.measured === "object") kept.measured = Object.fromEntries(Object.entries(node.measured).filter(([, value]) => typeof value === "number"));
    }
    made.nodes[kept.id] = kept;
  }
  for (const node of Object.values(made.nodes)) if (path(made, node.id)[0].parent !== null) throw new Error("messages that follow each other in a circle");
  const heads = (Array.isArray(given.lanes) ? given.lanes : []).slice(0, 2).map((lane) => ids.get(lane?.head)).filter(Boolean);
  const last = Object.values(made.nodes).sort((one, other) => other.created - one.created)[0];
  made.lanes = (heads.length ? heads : [last?.id ?? null]).map((head) => ({ head, options: { ...options } }));
  return made;
}

const text = (value, most = 4_000_000) => (typeof value === "string" ? value.slice(0, most) : "");
const number = (value, otherwise) => (Number.isFinite(value) ? value : otherwise);
