// Numbers as people read them.

const NONE = "–";

export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ms`;
}

export const seconds = (value) => (value < 1 ? ms(value * 1000) : `${Number(value.toFixed(1))} s`);

export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 10_000_000) return `${(value / 1e6).toFixed(0)} M`;
  if (value >= 1_000_000) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 10_000) return `${(value / 1e3).toFixed(0)} k`;
  return String(Math.round(value));
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const rate = (value) => (value ? `${bytes(value)}/s` : NONE);

export function share(part, whole) {
  if (!whole) return NONE;
  const percent = (100 * part) / whole;
  return `${percent > 99 && percent < 100 ? Math.min(99.9, percent).toFixed(1) : Math.round(percent)} %`;
}

export function ago(value) {
  return value < 2 ? "now" : value < 60 ? `${Math.floor(value)} s ago` : `${Math.floor(value / 60)} min ago`;
}

// A time that goes by: 40 s, 12 min, 3 h, 5 days.
export function length(value) {
  const [unit, words] = [[86_400, "days"], [3600, "h"], [60, "min"]].find(([seconds]) => value >= 2 * seconds) ?? [1, "s"];
  return `${Math.max(0, Math.floor(value / unit))} ${words}`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
