// Conversations, kept in this browser: IndexedDB, one record each, and a short one for the list. Bounded; the oldest go first.

const NAME = "baton-chats";
export const MAX_CONVERSATIONS = 300;
export const MAX_CHARS = 8_000_000; // of one conversation, as JSON

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => {
      asked.result.createObjectStore("heads", { keyPath: "id" }).createIndex("updated", "updated");
      asked.result.createObjectStore("bodies", { keyPath: "id" });
    };
    asked.onsuccess = () => {
      asked.result.onversionchange = () => asked.result.close();
      resolve(asked.result);
    };
    asked.onerror = () => reject(asked.error);
    asked.onblocked = () => reject(new Error("another tab holds an older store open"));
  });
  opened.catch(() => (opened = null));
  return opened;
}

// Run `act(heads, bodies)` in one transaction; what the request that it returns found.
async function within(mode, act) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(["heads", "bodies"], mode);
    const request = act(transaction.objectStore("heads"), transaction.objectStore("bodies"));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error("the browser's store is full"));
  });
}

// {id, title, updated, created, words}, the newest first. `words` are for the search.
export async function list() {
  return (await within("readonly", (heads) => heads.index("updated").getAll())).reverse();
}

export const load = (id) => within("readonly", (_, bodies) => bodies.get(id));
export const all = () => within("readonly", (_, bodies) => bodies.getAll());

const SEARCHED = 20_000;

// Keep it; returns the titles of what had to go for it. Throws Error when it is too long.
export async function save(conversation, title) {
  const text = Object.values(conversation.nodes).map((node) => node.content).join("\n");
  if (text.length > MAX_CHARS) throw new Error("this chat is too long to be kept: begin a new one");
  const head = { id: conversation.id, title, created: conversation.created, updated: conversation.updated, words: text.slice(0, SEARCHED) };
  const kept = structuredClone(conversation);
  await within("readwrite", (heads, bodies) => {
    heads.put(head);
    bodies.put(kept);
  });
  const gone = (await list()).slice(MAX_CONVERSATIONS);
  for (const one of gone) await remove(one.id);
  return gone.map((one) => one.title);
}

export async function rename(id, title) {
  const conversation = await load(id);
  if (conversation) await save({ ...conversation, title }, title);
}

export const remove = (id) => within("readwrite", (heads, bodies) => {
  heads.delete(id);
  bodies.delete(id);
});

export const removeAll = () => within("readwrite", (heads, bodies) => {
  heads.clear();
  bodies.clear();
});
