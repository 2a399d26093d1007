/** Wires the page: graph, panel, tables and navigation. */

const find = (id) => document.getElementById(id);

function startGraph(raw) {
  const picture = new Picture(raw);
  const live = find("graph-live");
  let graph;
  const panel = new Panel(find("graph-panel"), picture, (item) => graph.select(item));
  graph = new Graph(find("graph-canvas"), picture, {
    select: (box) => {
      panel.show(box);
      live.textContent = box ? `${box.full}${box.isTerminal ? "" : `, ${picture.regionLabel(box.item)}`}` : "Nothing selected";
    },
    open: () => find("graph-panel").focus(),
    zoom: (scale) => {
      find("zoom-level").textContent = `${Math.round(scale * 100)} %`;
    },
  });
  find("zoom-in").addEventListener("click", () => graph.zoom(ZOOM.step));
  find("zoom-out").addEventListener("click", () => graph.zoom(1 / ZOOM.step));
  find("zoom-fit").addEventListener("click", () => graph.fit());
  startSearch(graph);
  document.addEventListener("click", (event) => {
    const target = event.target.closest?.("[data-node]");
    if (!target) return;
    graph.select(Number(target.dataset.node) + picture.firstNode);
    find("graph").scrollIntoView();
    find("graph-canvas").focus({ preventScroll: true });
  });
}

function startSearch(graph) {
  const input = find("graph-search");
  const output = find("graph-matches");
  let matches = [];
  let next = 0;
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
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
