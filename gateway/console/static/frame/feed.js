// One stream of what the gateways do, as long as somebody looks. Pages listen to its events by `on`.

import { ApiError, onKeys, watch } from "./api.js";

const AGAIN_MS = 1000;
const listeners = new Set(); // {name, take}

// The newest of each: all fields of `fleet` and `figures` (docs/console.md), `requests`, `time_unix`; and of the stream itself `live`:
// "", "connecting", "live", "key" (a key is needed) or "lost", with `problem` (words) and `answered` (unix seconds of the last event).
export const feed = { state: {}, live: "connecting", problem: "", answered: 0 };

let stream = new AbortController();
let goOn = () => {};

// Call take(feed.state, name) with each event of this name ("fleet", "figures", "requests"), or of any ("*": also when `feed.live` changes),
// until `signal` is aborted; at once if one is known.
export function on(name, take, { signal } = {}) {
  const listener = { name, take };
  listeners.add(listener);
  signal?.addEventListener("abort", () => listeners.delete(listener));
  if (name === "*" || seen.has(name)) take(feed.state, name);
}

const seen = new Set();

function tell(name) {
  for (const listener of [...listeners]) if (listener.name === name || listener.name === "*") listener.take(feed.state, name);
}

export async function startFeed() {
  onKeys(restart);
  document.addEventListener("visibilitychange", restart);
  for (;;) {
    while (document.hidden) await pause(60_000);
    stream = new AbortController();
    let next = 200; // the gateway ends a stream now and then
    try {
      for await (const news of watch(stream.signal)) take(news);
    } catch (error) {
      const aborted = stream.signal.aborted;
      if (error instanceof ApiError) lost(error);
      else if (!aborted) console.error(error);
      next = aborted ? 0 : error.status === 401 ? 10 * AGAIN_MS : AGAIN_MS;
    }
    await pause(next);
  }
}

function take({ name, at, value }) {
  if (name === "requests") feed.state.requests = value;
  else Object.assign(feed.state, value, { time_unix: at });
  feed.answered = Date.now() / 1000;
  [feed.live, feed.problem] = ["live", ""];
  seen.add(name);
  tell(name);
}

function lost(error) {
  [feed.live, feed.problem] = [error.status === 401 ? "key" : "lost", error.message];
  tell("live");
}

// Until so many milliseconds have passed, or somebody wants a new stream.
function pause(milliseconds) {
  return new Promise((resolve) => {
    goOn = resolve;
    setTimeout(resolve, milliseconds);
  });
}

function restart() {
  stream.abort();
  goOn();
}
