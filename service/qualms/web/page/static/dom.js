// Small helpers that build elements without parsing markup.

export const find = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "∞";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

// A percentage with as many digits as it takes to differ from 0 and 100.
export function percent(share) {
  const value = 100 * share;
  const rest = Math.min(value, 100 - value);
  if (rest <= 0) return `${Math.round(value)} %`;
  const digits = rest >= 10 ? 0 : rest >= 0.95 ? 1 : Math.min(4, Math.ceil(-Math.log10(rest)) + 1);
  return `${Number(value.toFixed(digits))} %`;
}

export const words = (name) => name.replaceAll("_", " ");
