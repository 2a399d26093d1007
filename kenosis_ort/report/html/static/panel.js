/** The panel beside the graph: all that is known of the selected node. */

class Panel {
  /** `go(item)` selects another item. */
  constructor(root, picture, go) {
    this.root = root;
    this.picture = picture;
    this.go = go;
    this.empty = [...root.childNodes];
  }

  show(box) {
    if (box === null) this.root.replaceChildren(...this.empty);
    else if (box.isTerminal) this.root.replaceChildren(...this.terminal(box.item));
    else this.root.replaceChildren(...this.node(box.item));
    this.root.scrollTop = 0;
  }

  title(text) {
    return element("h3", { id: "panel-title" }, text);
  }

  terminal(item) {
    const isInput = item < this.picture.firstNode;
    return [
      this.title(this.picture.name(item)),
      element("p", { class: "muted" }, isInput ? "Input of the graph" : "Output of the graph"),
      ...this.neighbours(isInput ? "Read by" : "Computed by", (isInput ? this.picture.readers : this.picture.makers).get(item)),
    ];
  }

  node(item) {
    const node = this.picture.node(item);
    const chip = element("span", { class: `chip region-${this.picture.region(item)}` }, this.picture.regionLabel(item));
    const facts = [
      ["Rule", node.rule], ["Kernel", node.kernel], ["Absorbs", node.absorbed], ["Shape", node.shape],
      ["Weights", node.weight], ["Signal", node.signal === null ? "" : formatDecibels(node.signal)],
      ["Time", this.times(node)],
    ].filter(([, text]) => text);
    const weights = node.reads.map((read) => read.tensor).filter((tensor) => tensor?.isWeight);
    return [
      this.title(node.name),
      element("p", {}, `${node.operator} `, chip),
      element("p", { class: "reason" }, sentence(node.reason || node.why)),
      ...this.extra(node),
      element("dl", {}, ...facts.flatMap(([label, text]) => [element("dt", {}, label), element("dd", label === "Signal" || label === "Time" ? {} : { class: "mono" }, text)])),
      ...node.writes.flatMap((tensor) => this.tensor("Writes", tensor)),
      ...weights.flatMap((tensor) => this.tensor("Weights", tensor)),
      ...this.reads(node),
      ...this.neighbours("Reads from", this.picture.makers.get(item)),
      ...this.neighbours("Read by", this.picture.readers.get(item)),
    ];
  }

  extra(node) {
    const made = [];
    if (node.why && node.reason && !node.why.includes(node.reason)) {
      made.push(element("p", { class: "reason muted" }, `Runtime: ${sentence(node.why)}`));
    }
    if (node.remedy) made.push(element("p", { class: "reason" }, element("b", {}, "To change it: "), sentence(node.remedy)));
    return made;
  }

  times(node) {
    if (node.before === null && node.after === null) return "";
    return `${formatTime(node.before)} float, ${formatTime(node.after)} quantized`;
  }

  tensor(label, tensor) {
    if (!tensor) return [];
    const seen = `seen ${formatNumber(tensor.low)} to ${formatNumber(tensor.high)}`;
    const chosen = tensor.chosen ? `, represented ${formatNumber(tensor.chosen[0])} to ${formatNumber(tensor.chosen[1])}` : ", not quantized";
    const more = [
      tensor.precision, tensor.scales > 1 ? `${tensor.scales} scales` : "",
      tensor.signal === null ? "" : `rounding ${formatDecibels(tensor.signal)}`,
    ].filter(Boolean).join(", ");
    return [
      element("h4", {}, label),
      element("p", { class: "mono" }, tensor.name),
      element("p", { class: "muted" }, seen + chosen + (more ? `; ${more}` : "")),
      histogramOf(tensor) ?? "",
    ];
  }

  reads(node) {
    if (!node.reads.length) return [];
    const list = node.reads.map((read) =>
      element("li", {}, element("span", { class: "mono" }, read.value), element("br"), element("span", { class: "muted" }, `${read.how}: ${read.reason}`)));
    return [element("h4", {}, "How it reads its inputs"), element("ul", {}, ...list)];
  }

  neighbours(label, items) {
    if (!items?.length) return [];
    const shown = items.slice(0, 24).map((item) => {
      const button = element("button", { type: "button", class: "link mono" }, this.picture.name(item));
      button.addEventListener("click", () => this.go(item));
      return element("li", {}, button, element("span", { class: "muted" }, ` ${this.picture.operator(item)}`));
    });
    if (items.length > 24) shown.push(element("li", { class: "muted" }, `and ${items.length - 24} more`));
    return [element("h4", {}, label), element("ul", {}, ...shown)];
  }
}

/** Makes a sentence of a reason: a capital at the start, a full stop at the end. */
function sentence(text) {
  if (!text) return "";
  const capital = /^[a-z]+\b/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(capital) ? capital : `${capital}.`;
}
