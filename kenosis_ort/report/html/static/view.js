/** Boxes and lines of the graph, ready to draw and to find. */

/** Turns the data into boxes and lines, with what finding them quickly needs. */
function prepared(view, picture) {
  const boxes = view.items.map(([x, y], item) => itemBox(item, x, y, picture));
  const above = new Map();
  const below = new Map();
  const cells = new Map();
  boxes.forEach((box, index) => push(cells, cellOf(box.x, box.y), index));
  const lines = view.edges.map(([from, to, points, faint]) => {
    push(below, from, to);
    push(above, to, from);
    return { ...lineOf(from, to, points), faint: Boolean(faint) };
  });
  const near = (x, y) => {
    const found = [];
    for (const dx of [-1, 0, 1]) {
      for (const dy of [-1, 0, 1]) found.push(...(cells.get(cellOf(x + dx * 200, y + dy * 200)) ?? []));
    }
    return found;
  };
  return { ...view, boxes, lines, above, below, near };
}

function cellOf(x, y) {
  return `${Math.floor(x / 200)},${Math.floor(y / 200)}`;
}

function itemBox(item, x, y, picture) {
  const name = picture.name(item);
  const operator = picture.operator(item);
  return {
    item, x, y, region: picture.raw.regions[item], isTerminal: !picture.isNode(item),
    title: operator, under: name, full: `${operator} ${name}`,
  };
}

/** A line through points, its corners rounded. */
function lineOf(from, to, points) {
  const path = new Path2D();
  const xs = points.filter((_, index) => index % 2 === 0);
  const ys = points.filter((_, index) => index % 2 === 1);
  const last = xs.length - 1;
  path.moveTo(xs[0], ys[0]);
  for (let i = 1; i < last; i += 1) {
    const room = Math.min(Math.hypot(xs[i] - xs[i - 1], ys[i] - ys[i - 1]), Math.hypot(xs[i + 1] - xs[i], ys[i + 1] - ys[i]));
    path.arcTo(xs[i], ys[i], xs[i + 1], ys[i + 1], Math.min(12, room / 2));
  }
  if (last === 1 && xs[0] !== xs[1]) {
    const middle = (ys[0] + ys[1]) / 2;
    path.bezierCurveTo(xs[0], middle, xs[1], middle, xs[1], ys[1]);
  } else path.lineTo(xs[last], ys[last]);
  return {
    from, to, path, endX: xs[last], endY: ys[last],
    left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys), bottom: Math.max(...ys),
  };
}
