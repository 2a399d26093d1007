/** What the page knows of the graph: reads the compact data and gives it names. */

class Picture {
  constructor(raw) {
    this.raw = raw;
    this.firstNode = raw.inputs.length;
    this.firstOutput = this.firstNode + raw.nodes.length;
    this.readers = new Map();
    this.makers = new Map();
    for (const [from, to] of raw.view.edges) {
      push(this.readers, from, to);
      push(this.makers, to, from);
    }
  }

  /** Number of nodes, without inputs and outputs. */
  get size() {
    return this.raw.nodes.length;
  }

  region(item) {
    return this.raw.regionNames[this.raw.regions[item]];
  }

  regionLabel(item) {
    return this.raw.regionLabels[this.raw.regions[item]];
  }

  isNode(item) {
    return item >= this.firstNode && item < this.firstOutput;
  }

  name(item) {
    if (item < this.firstNode) return this.raw.inputs[item];
    if (item >= this.firstOutput) return this.raw.outputs[item - this.firstOutput];
    return this.raw.texts[this.raw.nodes[item - this.firstNode][0]];
  }

  operator(item) {
    if (item < this.firstNode) return "input";
    if (item >= this.firstOutput) return "output";
    return this.raw.texts[this.raw.nodes[item - this.firstNode][1]];
  }

  /** All facts of a node; the order is that of `_node` in picture.py. */
  node(item) {
    const entry = this.raw.nodes[item - this.firstNode];
    const text = (index) => this.raw.texts[entry[index]];
    return {
      name: text(0), operator: text(1), rule: text(2), reason: text(3), kernel: text(4), status: text(5),
      why: text(6), shape: text(7), weight: text(8), absorbed: text(9), remedy: text(10),
      signal: asNumber(entry[11]), before: asNumber(entry[12]), after: asNumber(entry[13]),
      reads: entry[14].map(([value, how, rule, reason, tensor]) => ({
        value: this.raw.texts[value], how: this.raw.texts[how], rule: this.raw.texts[rule],
        reason: this.raw.texts[reason], tensor: this.tensor(tensor),
      })),
      writes: entry[15].map((index) => this.tensor(index)),
    };
  }

  tensor(index) {
    const entry = this.raw.tensors[index];
    if (!entry) return null;
    const [name, isWeight, low, high, chosenLow, chosenHigh, precision, scales, signal, bars] = entry;
    return {
      name, isWeight: Boolean(isWeight), low: asNumber(low), high: asNumber(high), precision, scales,
      chosen: chosenLow === null ? null : [asNumber(chosenLow), asNumber(chosenHigh)],
      signal: asNumber(signal), bars,
    };
  }
}

function push(map, key, value) {
  const list = map.get(key);
  if (list) list.push(value);
  else map.set(key, [value]);
}

/** Reads a number; infinite ones come by name. */
function asNumber(value) {
  if (value === null || typeof value === "number") return value;
  return { inf: Infinity, "-inf": -Infinity }[value] ?? NaN;
}

function formatNumber(value) {
  if (value === null) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size < 1e-4 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
  return text.replace("-", "−");
}

function formatDecibels(value) {
  if (value === null) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "exact" : "no signal";
  return `${value.toFixed(1).replace("-", "−")} dB`;
}

function formatTime(ms) {
  if (ms === null) return "–";
  return ms < 0.1 ? `${formatNumber(ms * 1000)} µs` : `${formatNumber(ms)} ms`;
}
