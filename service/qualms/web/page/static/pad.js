// The drawing pad: white strokes on black, brought to the format of MNIST (20 pixels high or wide, centre of mass in the middle).

const PEN = 22;
const STEP = 8;

export class Pad {
  constructor(canvas, onDrawn, onPen) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.onDrawn = onDrawn;
    this.onPen = onPen;
    this.pen = { x: canvas.width / 2, y: canvas.height / 4, down: false };
    this.clear();
    canvas.addEventListener("pointerdown", (event) => this.#start(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.#end());
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  clear() {
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
  }

  #start(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.last = this.#position(event);
    this.#line(this.last, this.last);
  }

  #move(event) {
    if (!this.last) return;
    for (const one of event.getCoalescedEvents?.() || [event]) {
      const point = this.#position(one);
      this.#line(this.last, point);
      this.last = point;
    }
  }

  #end() {
    if (!this.last) return;
    this.last = null;
    this.send();
  }

  #key(event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (move) {
      const [width, height] = [this.canvas.width, this.canvas.height];
      const x = Math.min(width - PEN, Math.max(PEN, this.pen.x + STEP * move[0]));
      const y = Math.min(height - PEN, Math.max(PEN, this.pen.y + STEP * move[1]));
      if (this.pen.down) this.#line(this.pen, { x, y });
      Object.assign(this.pen, { x, y });
      this.onPen(`Pen ${this.pen.down ? "down" : "up"}, ${Math.round((100 * x) / width)} % across, ${Math.round((100 * y) / height)} % down`);
    } else if (event.key === " ") {
      this.pen.down = !this.pen.down;
      if (this.pen.down) this.#line(this.pen, this.pen);
      this.onPen(this.pen.down ? "Pen down" : "Pen up");
    } else if (event.key === "Enter") this.send();
    else if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else return;
    event.preventDefault();
  }

  #position(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  }

  #line(from, to) {
    Object.assign(this.context, { strokeStyle: "#fff", lineWidth: PEN, lineCap: "round", lineJoin: "round" });
    this.context.beginPath();
    this.context.moveTo(from.x, from.y);
    this.context.lineTo(to.x, to.y + 0.01);
    this.context.stroke();
  }

  // The ink's box and centre of mass; null if nothing is drawn.
  #ink() {
    const { width, height } = this.canvas;
    const data = this.context.getImageData(0, 0, width, height).data;
    const ink = { left: width, right: 0, top: height, bottom: 0, x: 0, y: 0, mass: 0 };
    for (let index = 0; index < width * height; index++) {
      const value = data[4 * index];
      if (!value) continue;
      const [x, y] = [index % width, Math.floor(index / width)];
      ink.left = Math.min(ink.left, x);
      ink.right = Math.max(ink.right, x + 1);
      ink.top = Math.min(ink.top, y);
      ink.bottom = Math.max(ink.bottom, y + 1);
      ink.mass += value;
      ink.x += value * (x + 0.5);
      ink.y += value * (y + 0.5);
    }
    return ink.mass ? ink : null;
  }

  send() {
    const ink = this.#ink();
    if (!ink) return;
    const out = document.createElement("canvas");
    out.width = out.height = 28;
    const context = out.getContext("2d");
    const scale = 20 / Math.max(ink.right - ink.left, ink.bottom - ink.top);
    const place = (centre, low, high) => Math.min(28 - high * scale, Math.max(-low * scale, 14 - centre * scale));
    context.fillRect(0, 0, 28, 28);
    context.imageSmoothingQuality = "high";
    const x = place(ink.x / ink.mass, ink.left, ink.right);
    const y = place(ink.y / ink.mass, ink.top, ink.bottom);
    context.drawImage(this.canvas, x, y, this.canvas.width * scale, this.canvas.height * scale);
    out.toBlob((blob) => this.onDrawn(blob), "image/png");
  }
}
