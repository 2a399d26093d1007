/** Tables that sort by a click on a heading, and the one of decisions that can be searched. */

function makeSortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button.sort").addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      sortRows(table, column, up);
    });
  });
}

function sortRows(table, column, up) {
  const body = table.tBodies[0];
  const collator = new Intl.Collator(undefined, { numeric: true });
  const sign = up ? 1 : -1;
  const keyed = [...body.rows].map((row) => [keyOf(row.cells[column]), row]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1; // what is not known comes last
    return sign * (typeof a === "number" ? a - b : collator.compare(a, b));
  });
  body.append(...keyed.map(([, row]) => row));
}

function keyOf(cell) {
  const value = cell.dataset.value;
  if (value === undefined) return cell.textContent.trim();
  if (value === "") return null;
  return asNumber(Number.isNaN(Number(value)) ? value : Number(value));
}

function makeSearchable(table, input, select, output) {
  const rows = [...table.tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const apply = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, index) => {
      const fits = (!select.value || row.dataset.region === select.value) && words.every((word) => texts[index].includes(word));
      row.hidden = !fits;
      shown += fits;
    });
    output.textContent = shown === rows.length ? `${shown} nodes` : `${shown} of ${rows.length} nodes`;
  };
  input.addEventListener("input", apply);
  select.addEventListener("change", apply);
}
