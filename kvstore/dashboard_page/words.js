// Numbers as people read them.

import { element } from "/charts.js";

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < 5) { value /= 1024; unit += 1; }
  const digits = value >= 100 || unit === 0 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

export function count(value) {
  if (value < 10 && value % 1) return value.toFixed(value < 1 ? 2 : 1);
  if (value < 10000) return Math.round(value).toLocaleString("en");
  let unit = 0;
  while (value >= 1000 && unit < 3) { value /= 1000; unit += 1; }
  return `${value.toFixed(value >= 100 ? 0 : 1)} ${["", "k", "M", "G"][unit]}`;
}

export function age(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, name] = units.find(([each]) => seconds >= each) || [1, "s"];
  return `${Math.round(seconds / size)} ${name}`;
}

export const percent = value => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
export const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function unitOf(text) {
  const [number, unit] = text.split(/ (.*)/);
  return element("span", { class: "number" }, number, " ", element("small", {}, unit || ""));
}
