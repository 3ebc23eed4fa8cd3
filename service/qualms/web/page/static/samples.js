// Samples: drawn digits from the service for digit models, and drawn images that are out of distribution for any model.

const SIZE = 96;

function random(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

function pixels(context, size, value) {
  const image = context.createImageData(size, size);
  for (let y = 0; y < size; y++) {
    for (let x = 0; x < size; x++) image.data.set([...value(x, y), 255], 4 * (y * size + x));
  }
  context.putImageData(image, 0, 0);
}

const DRAWINGS = {
  "Coloured noise": (context, size) => {
    const next = random(7);
    pixels(context, size, () => [256 * next(), 256 * next(), 256 * next()]);
  },
  Gradient: (context, size) => pixels(context, size, (x, y) => [(255 * x) / size, (255 * y) / size, 160]),
  Stripes: (context, size) => pixels(context, size, (x, y) => (((x + y) * 8) / size) & 1 ? [240, 240, 240] : [20, 40, 90]),
  Checks: (context, size) => pixels(context, size, (x, y) => (((x * 6) / size) ^ ((y * 6) / size)) & 1 ? [255, 120, 0] : [0, 90, 160]),
  Shapes: (context, size) => {
    context.fillStyle = "#f4e9c8";
    context.fillRect(0, 0, size, size);
    context.fillStyle = "#d1345b";
    context.beginPath();
    context.arc(0.35 * size, 0.38 * size, 0.22 * size, 0, 7);
    context.fill();
    context.fillStyle = "#0b6e4f";
    context.beginPath();
    context.moveTo(0.62 * size, 0.32 * size);
    context.lineTo(0.92 * size, 0.86 * size);
    context.lineTo(0.4 * size, 0.86 * size);
    context.fill();
  },
};

const STROKES = {
  Scribble: (context, size) => {
    const next = random(11);
    context.moveTo(size / 2, size / 2);
    for (let step = 0; step < 16; step++) {
      const [a, b, c, d] = [next(), next(), next(), next()].map((value) => size * (0.12 + 0.76 * value));
      context.quadraticCurveTo(a, b, c, d);
    }
  },
  "A letter": (context, size) => {
    for (const [x, y, to] of [[0.2, 0.15, 0], [0.2, 0.85, 1], [0.5, 0.4, 1], [0.8, 0.85, 1], [0.8, 0.15, 1]]) {
      if (to) context.lineTo(x * size, y * size);
      else context.moveTo(x * size, y * size);
    }
  },
};

function canvasOf(size) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  return canvas;
}

const toBlob = (canvas) => new Promise((done) => canvas.toBlob(done, "image/png"));

function strokes(draw) {
  const canvas = canvasOf(28);
  const context = canvas.getContext("2d");
  context.fillRect(0, 0, 28, 28);
  context.strokeStyle = "#fff";
  context.lineWidth = 2.2;
  context.lineCap = context.lineJoin = "round";
  context.beginPath();
  draw(context, 28);
  context.stroke();
  return toBlob(canvas);
}

function drawing(draw) {
  const canvas = canvasOf(SIZE);
  draw(canvas.getContext("2d"), SIZE);
  return toBlob(canvas);
}

export const isDigitModel = (model) =>
  model.classes.length === 10 && model.classes.every((name, index) => name.trim().startsWith(String(index)));

// Each sample: a name, whether it is in distribution, and a function that returns its file.
export function samplesOf(model, fetchFile) {
  const drawn = Object.entries(DRAWINGS).map(([name, draw]) => ({ name, file: () => drawing(draw) }));
  if (!isDigitModel(model)) return drawn;
  const digits = model.classes.map((_, index) => ({ name: `Digit ${index}`, file: () => fetchFile(`page/digit-${index}.png`) }));
  const odd = Object.entries(STROKES).map(([name, draw]) => ({ name, file: () => strokes(draw) }));
  return [...digits, ...odd, ...drawn.slice(0, 3)];
}
