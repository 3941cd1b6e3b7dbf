// Lines and stacked areas over time, as SVG: colours are classes, so they follow the theme. Charts that share a cursor move it together.

import { h, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 148;
const PAD = { left: 62, right: 10, top: 10, bottom: 20 };

// Where the pointer is, in unix seconds or null, for all charts of a page.
export function newCursor() {
  const moved = new Set();
  return { at: null, moved, set(at) { this.at = at; for (const tell of moved) tell(); } };
}

// {title, unit, hint, series: [{name, label, kind, hint}], format, tick, stack, steps, most, limit: {value, label}, cursor} → {element, draw(data)}.
// `kind` is a colour's class, `unit` says what is counted where `tick`, which writes the axis, doesn't, `steps` draws each value as long as it holds,
// `most` is the end of the axis, if that is always the same; data: {at, step_s, from, to, series: {name: [value or null]}, marks}.
export function chart({ title, unit = "", hint = "", series, format, tick = format, stack = false, steps = false, most = null, limit = null, cursor }) {
  const drawing = svg("svg", { class: "plot", "aria-hidden": "true" });
  const values = h("dl", { class: "values" });
  const when = h("span", { class: "when num" });
  const element = h("figure", { class: "chart", tabindex: 0, role: "group", "aria-label": title },
    h("figcaption", {}, h("span", { class: "name", title: hint }, title), unit ? h("span", { class: "unit" }, unit) : null, limit ? h("span", { class: "slo" }, limit.label) : null, when), drawing, values);
  let data = null;
  let scale = null;

  const draw = (news) => {
    data = news ?? data;
    const width = drawing.clientWidth;
    if (!data || !width) return;
    scale = scaleOf(data, series, { width, stack, most, limit });
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const lower = data.at.map(() => 0);
    const shapes = series.map((one) => {
      const column = data.series[one.name] ?? [];
      if (steps) return svg("path", { class: `line ${one.kind}`, d: stepsOf(data, column, scale) });
      if (!stack) return svg("g", { class: one.kind }, svg("path", { class: `line ${one.kind}`, d: lineOf(data, column, scale) }), svg("path", { class: `dots line ${one.kind}`, d: dotsOf(data, column, scale) }));
      const from = [...lower];
      data.at.forEach((_, index) => (lower[index] += column[index] ?? 0));
      return svg("path", { class: `area ${one.kind}`, d: areaOf(data, from, lower, scale) });
    });
    drawing.replaceChildren(...gridOf(data, scale, width, tick), ...marksOf(data, scale),
      ...shapes.reverse(), ...(limit && scale.top >= limit.value ? [level(scale, limit.value, width)] : []), svg("line", { class: "cursor", y1: PAD.top, y2: HEIGHT - PAD.bottom }));
    point();
  };

  const point = () => {
    if (!scale) return;
    const line = drawing.querySelector(".cursor");
    const index = cursor.at === null ? lastOf(data, series) : nearest(data, cursor.at);
    line.style.display = cursor.at === null || index < 0 ? "none" : "";
    if (index >= 0) for (const end of ["x1", "x2"]) line.setAttribute(end, scale.x(data.at[index] + data.step_s / 2));
    const cut = scale.peak > scale.top * 1.001 ? `peak ${format(scale.peak)}` : "";
    when.textContent = cursor.at === null || index < 0 ? cut : clock(data.at[index]);
    values.replaceChildren(...series.map((one) => h("div", { title: one.hint ?? null }, h("dt", {}, h("i", { class: one.kind }), one.label), h("dd", {}, format(data.series[one.name]?.[index] ?? null)))));
  };

  const follow = (event) => {
    if (!scale) return;
    const box = drawing.getBoundingClientRect();
    cursor.set(scale.time(event.clientX - box.left));
  };
  drawing.addEventListener("pointermove", follow);
  drawing.addEventListener("pointerdown", follow);
  drawing.addEventListener("pointerleave", () => cursor.set(null));
  element.addEventListener("keydown", (event) => {
    if (!data?.at.length || !["ArrowLeft", "ArrowRight", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return cursor.set(null);
    const index = cursor.at === null ? data.at.length - 1 : nearest(data, cursor.at) + (event.key === "ArrowLeft" ? -1 : 1);
    cursor.set(data.at[Math.max(0, Math.min(data.at.length - 1, index))] + data.step_s / 2);
  });
  element.addEventListener("blur", () => cursor.set(null));
  cursor.moved.add(point);
  new ResizeObserver(() => draw()).observe(drawing);
  return { element, draw };
}

function scaleOf(data, series, { width, stack, most, limit }) {
  const columns = series.map((one) => data.series[one.name] ?? []);
  const peaks = data.at.map((_, index) => {
    const here = columns.map((column) => column[index] ?? 0);
    return stack ? here.reduce((sum, value) => sum + value, 0) : Math.max(...here);
  });
  let top = topOf(peaks);
  if (limit && top >= limit.value / 3) top = Math.max(top, limit.value);
  const step = most ? most / 4 : stepOf((top || 1) / 3);
  top = most ?? Math.max(step, Math.ceil((top || 1) / step - 1e-9) * step);
  const [wide, high] = [width - PAD.left - PAD.right, HEIGHT - PAD.top - PAD.bottom];
  return {
    top, step,
    peak: Math.max(0, ...peaks),
    x: (at) => PAD.left + (wide * (at - data.from)) / (data.to - data.from),
    y: (value) => PAD.top + high * (1 - Math.min(1, value / top)),
    time: (x) => data.from + ((x - PAD.left) / wide) * (data.to - data.from),
  };
}

// The end of an axis on which most can be read: a few values far above the others are cut, and said.
export function topOf(peaks) {
  const ordered = peaks.filter((peak) => peak > 0).sort((a, b) => a - b);
  const [most, usual] = [ordered.at(-1) ?? 0, ordered[Math.ceil(ordered.length * 0.98) - 1] ?? 0];
  return ordered.length > 20 && most > 4 * usual ? 1.5 * usual : most;
}

// 1, 2 or 5 times a power of ten, at least `least`.
export function stepOf(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= least * (1 - 1e-9));
}

function gridOf(data, scale, width, tick) {
  const parts = [];
  for (let value = 0; value <= scale.top * 1.001; value += scale.step) {
    parts.push(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: scale.y(value), y2: scale.y(value) }));
    parts.push(svg("text", { x: PAD.left - 6, y: scale.y(value) + 3.5, "text-anchor": "end" }, value ? tick(value).replace(/\.0+(?=\D|$)/, "") : "0"));
  }
  const every = [60, 120, 300, 600, 900, 1800, 3600].find((step) => ((data.to - data.from) / step) * 62 <= width - PAD.left) ?? 7200;
  const zone = new Date(data.from * 1000).getTimezoneOffset() * 60;
  for (let at = Math.ceil((data.from - zone) / every) * every + zone; at < data.to; at += every) {
    const x = scale.x(at);
    if (x < PAD.left + 14 || x > width - 20) continue;
    parts.push(svg("text", { x, y: HEIGHT - 5, "text-anchor": "middle" }, clock(at).slice(0, 5)));
  }
  return parts;
}

const marksOf = (data, scale) => (data.marks ?? []).filter((mark) => mark.at >= data.from && mark.at <= data.to).map((mark) =>
  svg("line", { class: `mark ${mark.level}`, x1: scale.x(mark.at), x2: scale.x(mark.at), y1: PAD.top, y2: HEIGHT - PAD.bottom }));

const level = (scale, value, width) => svg("line", { class: "limit", x1: PAD.left, x2: width - PAD.right, y1: scale.y(value), y2: scale.y(value) });

const isKnown = (column, index) => (column[index] ?? null) !== null;

// A path through values that follow each other: across a time of which nothing is known there is no line.
export function lineOf(data, column, scale) {
  return data.at.map((at, index) => {
    if (!isKnown(column, index)) return "";
    const point = `${scale.x(at + data.step_s / 2).toFixed(1)} ${scale.y(column[index]).toFixed(1)}`;
    return isKnown(column, index - 1) ? `L${point}` : isKnown(column, index + 1) ? `M${point}` : "";
  }).join("");
}

// The values that no line leads to, as dots.
export function dotsOf(data, column, scale) {
  return data.at.map((at, index) => (!isKnown(column, index) || isKnown(column, index - 1) || isKnown(column, index + 1) ? ""
    : `M${scale.x(at + data.step_s / 2).toFixed(1)} ${scale.y(column[index]).toFixed(1)}h.01`)).join("");
}

// Each value as long as it holds.
export function stepsOf(data, column, scale) {
  return data.at.map((at, index) => {
    if (!isKnown(column, index)) return "";
    const [x, y] = [scale.x(at).toFixed(1), scale.y(column[index]).toFixed(1)];
    return `${isKnown(column, index - 1) ? `L${x} ${y}` : `M${x} ${y}`}H${scale.x(at + data.step_s).toFixed(1)}`;
  }).join("");
}

function areaOf(data, from, to, scale) {
  if (!data.at.length) return "";
  const x = (index) => scale.x(data.at[index] + data.step_s / 2).toFixed(1);
  const over = data.at.map((_, index) => `${index ? "L" : "M"}${x(index)} ${scale.y(to[index]).toFixed(1)}`);
  const under = data.at.map((_, index) => `L${x(index)} ${scale.y(from[index]).toFixed(1)}`).reverse();
  return `${over.join("")}${under.join("")}Z`;
}

export function nearest(data, at) {
  const index = Math.round((at - data.step_s / 2 - data.at[0]) / data.step_s);
  return Math.max(0, Math.min(data.at.length - 1, index));
}

// The newest instant at which something is known.
function lastOf(data, series) {
  for (let index = data.at.length - 1; index >= 0; index--) if (series.some((one) => (data.series[one.name]?.[index] ?? null) !== null)) return index;
  return -1;
}
