/** Draws the graph: regions, edges, boxes; less of it the smaller it is shown. */

const BOX = { width: 148, height: 40, radius: 7 };
const DETAIL = { text: 0.3, names: 0.55, arrows: 0.3, regions: 0.12 };

class Painter {
  constructor(canvas, picture) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.picture = picture;
    this.readColours();
  }

  /** Takes the colours from the page's style, so that light and dark are one set of names. */
  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(["surface", "ink", "muted", "line", "edge", "accent"].map((n) => [n, colour(n)]));
    this.solid = this.picture.raw.regionNames.map(colour);
    this.tint = this.picture.raw.regionNames.map((name) => colour(`${name}-tint`));
    this.sans = style.getPropertyValue("--sans");
    this.mono = style.getPropertyValue("--mono");
  }

  /** Draws everything that is in sight: `scene` says what is selected, found and hovered. */
  paint(view, camera, scene) {
    const { context: c, canvas } = this;
    const ratio = canvas.width / canvas.clientWidth || 1;
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.clearRect(0, 0, canvas.width, canvas.height);
    c.setTransform(ratio * camera.scale, 0, 0, ratio * camera.scale, ratio * camera.x, ratio * camera.y);
    const sight = {
      left: -camera.x / camera.scale, top: -camera.y / camera.scale,
      right: (canvas.clientWidth - camera.x) / camera.scale, bottom: (canvas.clientHeight - camera.y) / camera.scale,
    };
    if (camera.scale >= DETAIL.regions) this.paintRegions(view, sight);
    this.paintEdges(view, camera, sight, scene);
    view.boxes.forEach((box, index) => {
      if (inSight(box, sight)) this.paintBox(box, index, camera.scale, scene);
    });
  }

  /** A ground of its colour around every box; neighbours of one colour grow together. */
  paintRegions(view, sight) {
    const { context: c } = this;
    for (const box of view.boxes) {
      if (box.isTerminal || !inSight(box, sight)) continue;
      c.fillStyle = this.tint[box.region];
      c.fillRect(box.x - BOX.width / 2 - 12, box.y - BOX.height / 2 - 16, BOX.width + 24, BOX.height + 32);
    }
  }

  paintEdges(view, camera, sight, scene) {
    const { context: c } = this;
    c.lineJoin = "round";
    const thin = Math.max(1.1, 0.8 / camera.scale);
    for (const edge of view.lines) {
      if (edge.right < sight.left || edge.left > sight.right || edge.bottom < sight.top || edge.top > sight.bottom) continue;
      const near = scene.selected !== null && (edge.from === scene.selected || edge.to === scene.selected);
      c.strokeStyle = near ? this.colours.accent : this.colours.edge;
      c.lineWidth = near ? thin * 2 : thin;
      c.globalAlpha = edge.faint && !near ? 0.18 : 1;
      c.stroke(edge.path);
      if (camera.scale >= DETAIL.arrows) this.paintArrow(edge, near);
      c.globalAlpha = 1;
    }
  }

  paintArrow(edge, near) {
    const { context: c } = this;
    c.fillStyle = near ? this.colours.accent : this.colours.edge;
    c.beginPath();
    c.moveTo(edge.endX, edge.endY);
    c.lineTo(edge.endX - 4, edge.endY - 7);
    c.lineTo(edge.endX + 4, edge.endY - 7);
    c.fill();
  }

  paintBox(box, index, scale, scene) {
    const { context: c } = this;
    const left = box.x - BOX.width / 2;
    const top = box.y - BOX.height / 2;
    const chosen = index === scene.selected;
    const dimmed = scene.found !== null && !scene.found.has(index);
    c.globalAlpha = dimmed ? 0.3 : 1;
    c.beginPath();
    c.roundRect(left, top, BOX.width, BOX.height, box.isTerminal ? BOX.height / 2 : BOX.radius);
    c.fillStyle = scale < DETAIL.text ? this.solid[box.region] : this.colours.surface;
    c.fill();
    c.lineWidth = chosen ? 3 : index === scene.hovered ? 2.2 : 1.3;
    c.strokeStyle = chosen ? this.colours.accent : this.solid[box.region];
    c.stroke();
    if (scale >= DETAIL.text && !box.isTerminal) {
      c.fillStyle = this.solid[box.region];
      c.beginPath();
      c.roundRect(left, top, 6, BOX.height, [BOX.radius, 0, 0, BOX.radius]);
      c.fill();
    }
    if (scale >= DETAIL.text) this.paintText(box, left, top, scale);
    c.globalAlpha = 1;
  }

  paintText(box, left, top, scale) {
    const { context: c } = this;
    const room = BOX.width - 24;
    const two = scale >= DETAIL.names && box.under;
    c.fillStyle = this.colours.ink;
    c.textBaseline = "middle";
    c.font = `600 ${two ? 12.5 : 15}px ${this.sans}`;
    c.fillText(fitted(c, box.title, room), left + 14, top + (two ? 13.5 : 20.5));
    if (!two) return;
    c.fillStyle = this.colours.muted;
    c.font = `10.5px ${this.mono}`;
    c.fillText(fitted(c, box.under, room, true), left + 14, top + 28.5);
  }
}

function inSight(box, sight) {
  return (
    box.x + BOX.width > sight.left && box.x - BOX.width < sight.right &&
    box.y + BOX.height > sight.top && box.y - BOX.height < sight.bottom
  );
}

/** Shortens a text to a width; of names the end is kept, which tells them apart. */
function fitted(context, text, width, keepEnd = false) {
  if (context.measureText(text).width <= width) return text;
  let low = 0;
  let high = text.length;
  const cut = (count) => (keepEnd ? `…${text.slice(text.length - count)}` : `${text.slice(0, count)}…`);
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (context.measureText(cut(middle)).width <= width) low = middle;
    else high = middle - 1;
  }
  return cut(low);
}
