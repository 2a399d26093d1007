/** Small drawings in the panel, made of elements so that no text is ever read as markup. */

const SVG = "http://www.w3.org/2000/svg";
const HEIGHTS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/** Makes an element: `element("p", {class: "muted"}, "text", child)`. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Draws a tensor's histogram with its chosen range; null without one. */
function histogramOf(tensor) {
  if (!tensor.bars) return null;
  const [low, high, levels] = tensor.bars;
  const width = 288;
  const height = 78;
  const step = width / levels.length;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "histogram-svg", role: "img", preserveAspectRatio: "none" });
  svg.setAttribute("aria-label", `Histogram of ${tensor.name}`);
  const place = (value) => (width * (value - low)) / (high - low);
  const chosen = tensor.chosen?.map(place);
  if (chosen) {
    svg.append(shape("rect", { class: "inside", x: chosen[0], y: 0, width: Math.max(chosen[1] - chosen[0], 1), height }));
  }
  let path = "";
  [...levels].forEach((level, index) => {
    const tall = ((height - 2) * HEIGHTS.indexOf(level)) / (HEIGHTS.length - 1);
    if (tall) path += `M${(index * step).toFixed(1)} ${height}v${(-Math.max(tall, 2)).toFixed(1)}h${(step - 0.8).toFixed(1)}V${height}z`;
  });
  svg.append(shape("path", { class: "bars", d: path }));
  if (chosen) svg.append(shape("path", { class: "ends", d: `M${chosen[0]} 0V${height}M${chosen[1]} 0V${height}` }));
  const ends = element("p", { class: "ends-text mono" }, element("span", {}, formatNumber(low)), element("span", {}, formatNumber(high)));
  return element("div", {}, svg, ends);
}
