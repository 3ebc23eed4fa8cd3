// Charts: the Dirichlet density on the simplex, scores among the calibration images, and the recent flag rate.

import { element, number, percent, svg, words } from "./dom.js";

const NATS = 10;
const WIDTH = 300;
const HEIGHT = 260;

// Relative log density of Dir(alpha) at shares p; 0 at its highest point where all alpha are at least 1.
function logDensity(alpha, p) {
  return alpha.reduce((sum, one, index) => sum + (one - 1) * Math.log(Math.max(p[index], 1e-4)), 0);
}

function highest(alpha) {
  const free = alpha.map((one) => Math.max(one - 1, 0));
  const total = free.reduce((a, b) => a + b, 0);
  return logDensity(alpha, total ? free.map((one) => one / total) : alpha.map(() => 1 / alpha.length));
}

function heat(alpha, corners, colour) {
  const canvas = element("canvas", { width: 2 * WIDTH, height: 2 * HEIGHT });
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const top = highest(alpha);
  const [a, b, c] = corners;
  const area = (b[1] - c[1]) * (a[0] - c[0]) + (c[0] - b[0]) * (a[1] - c[1]);
  for (let row = 0; row < canvas.height; row++) {
    for (let column = 0; column < canvas.width; column++) {
      const [x, y] = [column / 2 - c[0], row / 2 - c[1]];
      const first = ((b[1] - c[1]) * x + (c[0] - b[0]) * y) / area;
      const second = ((c[1] - a[1]) * x + (a[0] - c[0]) * y) / area;
      const third = 1 - first - second;
      if (first < 0 || second < 0 || third < 0) continue;
      const level = Math.max(0, Math.min(1, 1 + (logDensity(alpha, [first, second, third]) - top) / NATS));
      image.data.set([...colour, 30 + 225 * level * level], 4 * (row * canvas.width + column));
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const short = (label) => (label.length > 16 ? `${label.slice(0, 15)}…` : label);

export function simplex(box, entries) {
  const names = entries.map((one) => one.label);
  const alpha = entries.map((one) => one.alpha);
  const colour = matchMedia("(prefers-color-scheme: dark)").matches ? [150, 165, 255] : [67, 56, 202];
  const label = `Density of Dir(${alpha.map(number).join(", ")}) over the probabilities of ${names.join(", ")}`;
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  box.replaceChildren(chart);
  if (alpha.length === 2) return beta(chart, names, alpha);
  const corners = [[150, 24], [20, 232], [280, 232]];
  const total = alpha.reduce((a, b) => a + b, 0);
  const mean = [0, 1].map((axis) => corners.reduce((sum, corner, index) => sum + (corner[axis] * alpha[index]) / total, 0));
  const frame = svg("polygon", { points: corners.map((one) => one.join(",")).join(" "), fill: "none", stroke: "currentColor", "stroke-opacity": 0.45 });
  heat(alpha, corners, colour).toBlob((blob) => {
    const url = URL.createObjectURL(blob);
    const image = svg("image", { href: url, width: WIDTH, height: HEIGHT, class: "density" });
    image.addEventListener("load", () => URL.revokeObjectURL(url));
    chart.prepend(image);
  });
  const text = (x, y, anchor, name) => svg("text", { x, y, "text-anchor": anchor }, short(name));
  chart.append(
    frame,
    svg("circle", { cx: mean[0], cy: mean[1], r: 6, fill: "none", stroke: "#d97706", "stroke-width": 2.5 }),
    text(150, 14, "middle", names[0]),
    text(4, 252, "start", names[1]),
    text(296, 252, "end", names[2]),
  );
}

// With two classes the simplex is a line: the density over the probability of the first class.
function beta(chart, names, alpha) {
  const top = highest(alpha);
  const points = Array.from({ length: 261 }, (_, index) => {
    const p = index / 260;
    return `${20 + index},${220 - 190 * Math.min(1, Math.exp(logDensity(alpha, [p, 1 - p]) - top))}`;
  });
  chart.append(
    svg("polygon", { points: `20,220 ${points.join(" ")} 280,220`, class: "area density" }),
    svg("line", { x1: 20, x2: 280, y1: 220, y2: 220, stroke: "currentColor", "stroke-opacity": 0.45 }),
    svg("circle", { cx: 20 + (260 * alpha[0]) / (alpha[0] + alpha[1]), cy: 220, r: 6, fill: "none", stroke: "#d97706", "stroke-width": 2.5 }),
    svg("text", { x: 4, y: 244 }, short(names[1])),
    svg("text", { x: 296, y: 244, "text-anchor": "end" }, short(names[0])),
  );
}

// Share of the calibration images at or below a value, by linear interpolation of the quantiles.
function share(quantiles, levels, value) {
  if (value < quantiles[0]) return 0;
  if (value >= quantiles.at(-1)) return 1;
  const after = quantiles.findIndex((one) => one > value);
  const [low, high] = [quantiles[after - 1], quantiles[after]];
  return levels[after - 1] + ((levels[after] - levels[after - 1]) * (value - low)) / (high - low);
}

const BINS = 60;

// One score: its distribution on the calibration images, the image's value and the threshold. Right is more uncertain.
export function score(name, value, distribution, levels, threshold, isFlagScore) {
  const known = distribution.quantiles.map((one, index) => [one, levels[index]]).filter(([one]) => one !== null);
  const quantiles = known.map(([one]) => one);
  const itsLevels = known.map(([, level]) => level);
  const at = (level) => quantiles[itsLevels.findIndex((one) => one >= level)] ?? quantiles.at(-1);
  const lower = distribution.direction === "lower";
  const skewed = quantiles[0] > 0 && at(0.99) / at(0.5) > 20;
  const axis = skewed ? Math.log : (one) => one;
  const inverse = skewed ? Math.exp : (one) => one;
  const finite = [at(0.001), at(0.999), threshold, value].filter((one) => Number.isFinite(one) && (!skewed || one > 0)).map(axis);
  const bulk = axis(at(0.99)) - axis(at(0.01)) || 1;
  const low = Math.max(Math.min(...finite), axis(at(0.01)) - 1.5 * bulk);
  const high = Math.min(Math.max(...finite), axis(at(0.99)) + 1.5 * bulk);
  const span = high - low || 1;
  const place = (one) => {
    const position = Math.max(0, Math.min(1, (axis(one) - low) / span));
    return 6 + 288 * (lower ? 1 - position : position);
  };
  const edges = Array.from({ length: BINS + 1 }, (_, index) => inverse(low + (span * index) / BINS));
  const masses = edges.slice(1).map((edge, index) => share(quantiles, itsLevels, edge) - share(quantiles, itsLevels, edges[index]));
  const tallest = Math.max(...masses) || 1;
  const bars = masses.map((mass, index) => {
    const [a, b] = [place(edges[index]), place(edges[index + 1])];
    const height = 34 * Math.sqrt(mass / tallest);
    return svg("rect", { x: Math.min(a, b), width: Math.abs(b - a) + 0.2, y: 40 - height, height, class: "area" });
  });
  const isFinite = Number.isFinite(value) && (!skewed || value > 0);
  const x = isFinite ? place(value) : skewed && value <= 0 ? (lower ? 294 : 6) : 294;
  const below = isFinite ? share(quantiles, itsLevels, value) : 1;
  const rarer = lower ? 1 - below : below;
  const text = `${words(name)}: ${number(value)}, more uncertain than about ${percent(rarer)} of the calibration images${threshold === null ? "" : `; threshold ${number(threshold)}`}`;
  const chart = svg(
    "svg",
    { viewBox: "0 0 300 46", preserveAspectRatio: "none", role: "img", "aria-label": text },
    ...bars,
    svg("line", { x1: 0, x2: 300, y1: 40.5, y2: 40.5, class: "axis" }),
    ...(threshold === null ? [] : [svg("line", { x1: place(threshold), x2: place(threshold), y1: 2, y2: 40, class: "limit" })]),
    svg("line", { x1: x, x2: x, y1: 4, y2: 45, class: "mark" }),
  );
  const head = element("div", { class: "score-head" }, element("strong", {}, words(name) + (isFlagScore ? " (flags)" : "")), element("span", { class: "muted" }, number(value)));
  return element("li", { class: isFlagScore ? "flagging" : "" }, head, chart);
}

// The recent flag rate in intervals, with the guaranteed rate and the bound of alerts.
export function recent(box, model) {
  const { images, flagged } = model.recent;
  const rates = images.map((count, index) => (count ? flagged[index] / count : 0));
  const top = Math.max(...rates, 3 * model.rate_bound);
  const y = (rate) => 74 - 66 * (rate / top);
  const label = `Share of flagged images in ${images.length} intervals of ${model.recent.interval_seconds} seconds`;
  const bars = images.map((count, index) => {
    const height = count ? Math.max(2, 74 - y(rates[index])) : 1;
    const kind = count ? `interval${rates[index] > model.rate_bound ? " high" : ""}` : "none";
    return svg("rect", { x: index * 10 + 1, width: 8, y: 74 - height, height, class: kind });
  });
  const line = (rate, kind) => svg("line", { x1: 0, x2: 600, y1: y(rate), y2: y(rate), class: kind });
  const chart = svg("svg", { viewBox: "0 0 600 76", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars, line(model.rate_bound, "limit"), line(model.target_fpr, "target"));
  box.replaceChildren(chart);
}
