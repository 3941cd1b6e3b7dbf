// The gateway's HTTP API. Keys live in sessionStorage: they are gone with the tab, and no other site sees them.

const NAMES = { api: "baton.api-key", admin: "baton.admin-key" };

export const key = (kind) => sessionStorage.getItem(NAMES[kind]) ?? "";

export function setKeys({ api, admin }) {
  for (const [kind, value] of Object.entries({ api, admin })) {
    if (value) sessionStorage.setItem(NAMES[kind], value);
    else sessionStorage.removeItem(NAMES[kind]);
  }
  dispatchEvent(new Event("baton-keys"));
}

// Call `take` whenever keys were entered or forgotten.
export const onKeys = (take, { signal } = {}) => addEventListener("baton-keys", take, { signal });

const ROOT = new URL("../../../", import.meta.url);

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// What operators see needs the admin key where there is one, and an API key otherwise.
export const operator = () => key("admin") || key("api");

export const readRequest = async (id) => (await call(`debug/requests/${encodeURIComponent(id)}`, { with: operator() })).requests;
export const readModels = async () => (await call("v1/models", { with: key("api") })).data.filter((one) => one.root === one.id); // no alias
export const setRoles = (worker, roles) => order(worker, "roles", { roles });
export const setDraining = (worker, draining) => order(worker, "drain", { draining });

const order = (worker, what, body) =>
  call(`admin/workers/${encodeURIComponent(worker)}/${what}`, { with: key("admin"), method: "POST", body });

// A checked answer of `path` (relative to the gateway's root), with a key: {with, method, body (JSON, or a FormData), signal}. Throws ApiError.
export async function send(path, { with: secret, method = "GET", body, signal }) {
  const headers = secret ? { authorization: `Bearer ${secret}` } : {};
  const isForm = body instanceof FormData;
  if (body && !isForm) headers["content-type"] = "application/json";
  const options = { method, headers, body: isForm ? body : body && JSON.stringify(body), signal, cache: "no-store", credentials: "omit" };
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError(0, "the gateway does not answer");
  }
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new ApiError(answer.status, told?.error?.message || `HTTP ${answer.status}`);
  }
  return answer;
}

// The same as JSON, within 10 s.
export async function call(path, options = {}) {
  const late = AbortSignal.timeout(10_000);
  try {
    return await (await send(path, { ...options, signal: options.signal ? AbortSignal.any([options.signal, late]) : late })).json();
  } catch (error) {
    if (error instanceof ApiError || options.signal?.aborted) throw error;
    throw new ApiError(0, "the gateway does not answer");
  }
}

const SILENT_MS = 15_000; // the stream speaks each 5 s

// What the gateways do, as it changes: {name, at, value}, `at` in unix seconds. Throws ApiError when the stream can't be had or falls silent.
export async function* watch(signal) {
  const silent = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silent.abort(), SILENT_MS);
  };
  heard();
  try {
    const answer = await send("console/events", { with: operator(), signal: AbortSignal.any([signal, silent.signal]) });
    for await (const block of blocks(answer.body, heard)) {
      const fields = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.data) yield { name: fields.event, at: Number(fields.id), value: JSON.parse(fields.data) };
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError(0, "the gateway does not answer");
  } finally {
    clearTimeout(timer);
  }
}

// The chunks of a streamed chat answer as they come. Throws ApiError, also for an error within the stream.
export async function* chat(body, signal) {
  const answer = await send("v1/chat/completions", { with: key("api"), method: "POST", body, signal });
  for await (const block of blocks(answer.body)) {
    if (!block.startsWith("data: ")) continue;
    const data = block.slice(6);
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "the answer was cut off");
}

// The blocks of a stream of server-sent events.
export async function* blocks(stream, heard = () => {}) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
