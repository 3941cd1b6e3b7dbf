// The dialog in which keys are entered.

import { key, setKeys } from "./api.js";
import { button, byId, h, toast } from "./dom.js";

// `kind`: "api" or "admin", the one that is missing.
export function openKeys(kind = "api") {
  byId("api-key").value = key("api");
  byId("admin-key").value = key("admin");
  byId("keys").showModal();
  byId(`${kind}-key`).focus();
}

// For what could not be read: `words`, where the admin key is missing.
export const unread = (error, ...words) => error.status === 401
  ? [...words.map((one, at) => h("p", { class: at ? "hint" : null }, one)), button("Enter the admin key", () => openKeys("admin"), { class: "primary" })]
  : [h("p", { class: "note error" }, error.message)];

export function startKeys() {
  byId("open-keys").addEventListener("click", () => openKeys());
  byId("keys-cancel").addEventListener("click", () => byId("keys").close());
  byId("keys-form").addEventListener("submit", () => setKeys({ api: byId("api-key").value.trim(), admin: byId("admin-key").value.trim() }));
  byId("forget").addEventListener("click", () => {
    byId("keys").close();
    toast("The keys are forgotten.");
    setKeys({});
  });
  byId("keys").addEventListener("close", () => (byId("api-key").value = byId("admin-key").value = ""));
}
