// Making and updating elements. Text is only ever set as text: what models and workers say is not markup.

// h("p", {class: "x", "data-key": 1}, "text", child, null): an element. `style` is an object of CSS properties.
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

export const section = (more, ...children) => h("section", { class: "panel", ...more }, ...children);

export const quietly = (more, words) => h("button", { type: "button", class: "quiet", ...more }, words);

// A quiet button, unless `more` has another class.
export function button(words, act, more = {}) {
  const made = quietly(more, words);
  made.addEventListener("click", act);
  return made;
}

// Have the browser keep a Blob as a file.
export function save(content, name) {
  const url = URL.createObjectURL(content);
  const link = h("a", { href: url, download: name, class: "hidden" }, name);
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

// Show a dialog once; the value that it is closed with.
export function opened(dialog) {
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(dialog.returnValue);
  }, { once: true }));
}

// Names and values.
export const pairs = (kind, entries) => h("dl", { class: kind }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

// What may be wider than the page: it scrolls, also by keyboard.
export const scroll = (name, child, more = "") => h("div", { class: `scroll${more}`, tabindex: 0, role: "region", "aria-label": name }, child);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Make `parent`'s children look like `wanted`, changing what differs and nothing else: focus, scrolling and a pressed button
// survive. Children with a `data-key` are matched by it, the others by their place.
export function patch(parent, wanted) {
  const focused = document.activeElement;
  const keyed = new Map([...parent.children].filter((child) => child.dataset.key).map((child) => [child.dataset.key, child]));
  let place = parent.firstChild;
  for (const node of wanted.flat().filter(Boolean).map((one) => (typeof one === "string" ? new Text(one) : one))) {
    const key = node.dataset?.key;
    let old = key ? keyed.get(key) : place && !place.dataset?.key ? place : null;
    if (old && !sameKind(old, node)) old = null;
    if (!old) {
      parent.insertBefore(node, place);
      continue;
    }
    if (old === place) place = place.nextSibling;
    else parent.insertBefore(old, place);
    update(old, node);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

const sameKind = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName;

function update(old, node) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!node.hasAttribute(name) && name !== "open" && name !== "style") old.removeAttribute(name);
  for (const { name, value } of node.attributes) {
    if (name === "style" ? old.style.cssText !== node.style.cssText : old.getAttribute(name) !== value) {
      if (name === "style") old.style.cssText = node.style.cssText;
      else old.setAttribute(name, value);
    }
  }
  patch(old, [...node.childNodes]);
}

export const byId = (id) => document.getElementById(id);

// Told to screen readers, and not shown: it can be seen elsewhere.
export const announce = (text) => (byId("announcement").textContent = text);

let toastTimer = 0;

// A short message, also for screen readers.
export function toast(text, kind = "") {
  const element = byId("toast");
  element.textContent = text;
  element.className = `toast shown ${kind}`;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => element.classList.remove("shown"), 6000);
}

let answer = () => {}; // of the question before

// Ask before something is done; whether it shall be. News of a closed dialog may come when the next question is already open.
export function confirmed(title, text, verb) {
  const dialog = byId("confirm");
  answer(dialog.returnValue === "yes");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = verb;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    answer = resolve;
    dialog.onclose = () => dialog.open || resolve(dialog.returnValue === "yes");
  });
}
