/** The picture as something to move in: camera, pointer, wheel, keys, selection. */

const ZOOM = { least: 0.02, most: 2.5, step: 1.3, start: 1 };

class Graph {
  /** `listeners.select(box or null)`, `listeners.open(box)`, `listeners.zoom(scale)`. */
  constructor(canvas, picture, listeners) {
    this.canvas = canvas;
    this.picture = picture;
    this.listeners = listeners;
    this.painter = new Painter(canvas, picture);
    this.view = prepared(picture.raw.view, picture);
    this.camera = { x: 0, y: 0, scale: 1 };
    this.scene = { selected: null, hovered: null, found: null };
    this.pointers = new Map();
    this.moved = false;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.listen();
  }

  get selected() {
    return this.scene.selected === null ? null : this.view.boxes[this.scene.selected];
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("dblclick", (event) => this.openAt(event));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    addEventListener("beforeprint", () => this.recolour());
  }

  recolour() {
    this.painter.readColours();
    this.draw();
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    const width = Math.round(this.canvas.clientWidth * ratio);
    const height = Math.round(this.canvas.clientHeight * ratio);
    if (!width || !height) return;
    const first = !this.sized;
    this.sized = true;
    this.canvas.width = width;
    this.canvas.height = height;
    if (first) this.fit();
    this.painter.paint(this.view, this.camera, this.scene);
  }

  draw() {
    if (this.waiting || !this.sized) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.painter.paint(this.view, this.camera, this.scene);
      this.listeners.zoom(this.camera.scale);
    });
  }

  fit() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const { width: wide, height: tall } = this.view;
    const scale = Math.min(ZOOM.start, (width - 24) / wide, (height - 24) / tall);
    this.camera = { scale, x: (width - wide * scale) / 2, y: (height - tall * scale) / 2 };
    this.draw();
  }

  zoom(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const { camera } = this;
    const scale = Math.min(ZOOM.most, Math.max(ZOOM.least, camera.scale * factor));
    camera.x = x - ((x - camera.x) * scale) / camera.scale;
    camera.y = y - ((y - camera.y) * scale) / camera.scale;
    camera.scale = scale;
    this.draw();
  }

  /** Brings a place to the middle, at least so large that names can be read. */
  centre(x, y, scale = Math.max(this.camera.scale, 0.8)) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.glide({ scale, x: width / 2 - x * scale, y: height / 2 - y * scale });
  }

  glide(goal) {
    if (this.calm) {
      this.camera = goal;
      this.draw();
      return;
    }
    const start = { ...this.camera };
    const begin = performance.now();
    const run = (this.gliding = {});
    const step = (now) => {
      if (this.gliding !== run) return;
      const part = Math.min(1, Math.max(0, (now - begin) / 180));
      const eased = 1 - (1 - part) ** 3;
      for (const key of ["x", "y", "scale"]) this.camera[key] = start[key] + (goal[key] - start[key]) * eased;
      this.draw();
      if (part < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  select(index, { centre = true } = {}) {
    this.scene.selected = index;
    const box = this.selected;
    if (box && centre) this.centre(box.x, box.y);
    this.draw();
    this.listeners.select(box);
  }

  /** Marks boxes by a test; returns how many, null for no search. */
  find(test) {
    if (test === null) this.scene.found = null;
    else this.scene.found = new Set(this.view.boxes.flatMap((box, index) => (test(box) ? [index] : [])));
    this.draw();
    return this.scene.found ? [...this.scene.found] : null;
  }

  // ---- pointer ----

  at(event) {
    const frame = this.canvas.getBoundingClientRect();
    return { x: event.clientX - frame.left, y: event.clientY - frame.top };
  }

  boxAt({ x, y }) {
    const gx = (x - this.camera.x) / this.camera.scale;
    const gy = (y - this.camera.y) / this.camera.scale;
    const slack = 4 / this.camera.scale;
    return this.view.near(gx, gy).find((index) => {
      const box = this.view.boxes[index];
      return Math.abs(box.x - gx) <= BOX.width / 2 + slack && Math.abs(box.y - gy) <= BOX.height / 2 + slack;
    }) ?? null;
  }

  press(event) {
    if (event.button !== 0) return;
    this.gliding = null;
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.at(event));
    this.moved = false;
  }

  move(event) {
    const now = this.at(event);
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.hover(this.boxAt(now));
      return;
    }
    if (Math.hypot(now.x - before.x, now.y - before.y) < 3 && !this.moved) return;
    this.moved = true;
    this.canvas.classList.add("dragging");
    if (this.pointers.size === 2) this.pinch(event.pointerId, now);
    else {
      this.camera.x += now.x - before.x;
      this.camera.y += now.y - before.y;
      this.draw();
    }
    this.pointers.set(event.pointerId, now);
  }

  pinch(moving, now) {
    const other = [...this.pointers].find(([id]) => id !== moving)[1];
    const before = this.pointers.get(moving);
    const ratio = Math.hypot(now.x - other.x, now.y - other.y) / Math.hypot(before.x - other.x, before.y - other.y);
    if (Number.isFinite(ratio)) this.zoom(ratio, (now.x + other.x) / 2, (now.y + other.y) / 2);
  }

  release(event) {
    const pressed = this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("dragging");
    if (pressed && !this.moved && event.type === "pointerup") {
      const index = this.boxAt(this.at(event));
      this.select(index, { centre: false });
    }
  }

  openAt(event) {
    const index = this.boxAt(this.at(event));
    if (index !== null) this.listeners.open(this.view.boxes[index]);
  }

  hover(index) {
    if (index === this.scene.hovered) return;
    this.scene.hovered = index;
    this.canvas.classList.toggle("over", index !== null);
    this.canvas.title = index === null ? "" : this.view.boxes[index].full;
    this.draw();
  }

  wheel(event) {
    if (document.activeElement !== this.canvas && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.gliding = null;
    const { x, y } = this.at(event);
    this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), x, y);
  }

  // ---- keys ----

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const pan = { ArrowUp: [0, 60], ArrowDown: [0, -60], ArrowLeft: [60, 0], ArrowRight: [-60, 0] }[event.key];
    if (pan && event.shiftKey) {
      this.camera.x += pan[0];
      this.camera.y += pan[1];
      this.draw();
    } else if (pan) this.walk(event.key);
    else if (event.key === "+" || event.key === "=") this.zoom(ZOOM.step);
    else if (event.key === "-") this.zoom(1 / ZOOM.step);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.selected) this.listeners.open(this.selected);
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  walk(key) {
    const { selected } = this.scene;
    if (selected === null) {
      this.select(0);
      return;
    }
    const next = {
      ArrowDown: () => this.view.below.get(selected)?.[0],
      ArrowUp: () => this.view.above.get(selected)?.[0],
      ArrowRight: () => this.beside(selected, 1),
      ArrowLeft: () => this.beside(selected, -1),
    }[key]();
    if (next !== undefined) this.select(next);
  }

  /** The nearest box in the same row. */
  beside(index, sign) {
    const own = this.view.boxes[index];
    let best;
    let distance = Infinity;
    this.view.boxes.forEach((box, other) => {
      const gap = (box.x - own.x) * sign;
      if (Math.abs(box.y - own.y) < 2 && gap > 0 && gap < distance) [best, distance] = [other, gap];
    });
    return best;
  }
}
