// The gateway's HTTP API. Keys live in sessionStorage: they are gone with the tab, and no other site sees them.

const NAMES = { api: "baton.api-key", admin: "baton.admin-key" };

export const key = (kind) => sessionStorage.getItem(NAMES[kind]) ?? "";

export function setKeys({ api, admin }) {
  for (const [kind, value] of Object.entries({ api, admin })) {
    if (value) sessionStorage.setItem(NAMES[kind], value);
    else sessionStorage.removeItem(NAMES[kind]);
  }
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// What operators see needs the admin key where there is one, and an API key otherwise.
const operator = () => key("admin") || key("api");

export const readState = () => call("console/state", { with: operator() });
export const readRequests = (limit) => call(`debug/requests?limit=${limit}`, { with: operator() });
export const readRequest = async (id) => (await call(`debug/requests/${encodeURIComponent(id)}`, { with: operator() })).requests;
export const readModels = async () => (await call("v1/models", { with: key("api") })).data;
export const setRoles = (worker, roles) => order(worker, "roles", { roles });
export const setDraining = (worker, draining) => order(worker, "drain", { draining });

const order = (worker, what, body) =>
  call(`admin/workers/${encodeURIComponent(worker)}/${what}`, { with: key("admin"), method: "POST", body });

async function send(path, { with: secret, method = "GET", body, signal }) {
  const headers = secret ? { authorization: `Bearer ${secret}` } : {};
  if (body) headers["content-type"] = "application/json";
  const options = { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store", credentials: "omit" };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError(0, "the gateway does not answer");
  }
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new ApiError(answer.status, told?.error?.message ?? `HTTP ${answer.status}`);
  }
  return answer;
}

async function call(path, options) {
  try {
    return await (await send(path, { ...options, signal: AbortSignal.timeout(10_000) })).json();
  } catch (error) {
    throw error instanceof ApiError ? error : new ApiError(0, "the gateway does not answer");
  }
}

// The chunks of a streamed chat answer as they come. Throws ApiError, also for an error within the stream.
export async function* chat(body, signal) {
  const answer = await send("v1/chat/completions", { with: key("api"), method: "POST", body, signal });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "the answer was cut off");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
