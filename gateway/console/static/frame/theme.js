// Light or dark: as the system has it, or as somebody chose. `onTheme` tells those who draw with colours of their own.

import { byId } from "./dom.js";

const NAME = "baton.theme";
const THEMES = ["system", "light", "dark"];

export function startTheme() {
  const stored = localStorage.getItem(NAME);
  const radios = [...byId("theme").elements].filter((one) => one.type === "radio");
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    for (const radio of radios) radio.checked = radio.value === theme;
  };
  apply(THEMES.includes(stored) ? stored : "system");
  byId("theme").addEventListener("change", (event) => {
    localStorage.setItem(NAME, event.target.value);
    apply(event.target.value);
    dispatchEvent(new Event("baton-theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("baton-theme")));
}

export const onTheme = (take, { signal }) => addEventListener("baton-theme", take, { signal });
