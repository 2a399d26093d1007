/** Wires the page: graph, panel, tables and navigation. */

const find = (id) => document.getElementById(id);

function startGraph(raw) {
  const picture = new Picture(raw);
  const live = find("graph-live");
  const buttons = [];
  let graph;
  const openBlock = (box) => {
    if (!box.block) {
      find("graph-panel").focus();
      return;
    }
    const items = Array.from({ length: box.block.length }, (_, index) => box.item + index);
    graph.show(0);
    mark();
    graph.frame(items);
    graph.select(graph.view.boxOf(box.item), { centre: false });
  };
  const mark = () => buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === graph.current)));
  const go = (item) => {
    graph.selectItem(item);
    mark();
  };
  const panel = new Panel(find("graph-panel"), picture, { go, open: openBlock });
  graph = new Graph(find("graph-canvas"), picture, {
    select: (box) => {
      panel.show(box);
      live.textContent = box ? `${box.full}${box.block || box.isTerminal ? "" : `, ${picture.regionLabel(box.item)}`}` : "Nothing selected";
    },
    open: openBlock,
    zoom: (scale) => {
      find("zoom-level").textContent = `${Math.round(scale * 100)} %`;
    },
  });
  if (picture.views.length > 1) {
    picture.views.forEach((view, index) => {
      const button = element("button", { type: "button" }, view.label);
      button.addEventListener("click", () => {
        graph.show(index);
        mark();
      });
      buttons.push(button);
    });
    buttons.reverse();
    find("graph-views").append(...buttons);
    buttons.reverse();
    mark();
  }
  find("zoom-in").addEventListener("click", () => graph.zoom(ZOOM.step));
  find("zoom-out").addEventListener("click", () => graph.zoom(1 / ZOOM.step));
  find("zoom-fit").addEventListener("click", () => graph.fit());
  startSearch(graph, picture, mark);
  document.addEventListener("click", (event) => {
    const target = event.target.closest?.("[data-node]");
    if (!target) return;
    go(Number(target.dataset.node) + picture.firstNode);
    find("graph").scrollIntoView();
    find("graph-canvas").focus({ preventScroll: true });
  });
}

function startSearch(graph, picture, mark) {
  const input = find("graph-search");
  const output = find("graph-matches");
  let matches = [];
  let next = 0;
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    if (wanted && graph.current !== 0) {
      graph.show(0);
      mark();
    }
    matches = graph.find(wanted ? (box) => box.full.toLowerCase().includes(wanted) : null) ?? [];
    next = 0;
    output.textContent = wanted ? `${matches.length} found${matches.length ? ", Enter shows the next" : ""}` : "";
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !matches.length) return;
    event.preventDefault();
    graph.select(matches[next % matches.length]);
    next += 1;
  });
}

/** Marks in the navigation which section is on screen. */
function followSections() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const visible = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) visible.add(entry.target.id);
      else visible.delete(entry.target.id);
    }
    const current = [...links.keys()].find((id) => visible.has(id));
    for (const [id, link] of links) {
      if (id === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-10% 0px -60% 0px" });
  for (const id of links.keys()) observer.observe(find(id));
}

const pictureData = find("picture-data");
if (pictureData) startGraph(JSON.parse(pictureData.textContent));
for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
const decisionTable = find("decision-table");
if (decisionTable) {
  makeSearchable(decisionTable, find("decision-search"), find("decision-region"), find("decision-count"));
}
followSections();
