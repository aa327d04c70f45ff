/** The grid of heads as a drawing for a file. */
import { inkOn } from "./colour";
import type { GridRow } from "./head-grid";
import { heatUrl } from "./heat-map";

const NAMESPACE = "http://www.w3.org/2000/svg";
const CELL = 30;
const LEFT = 44;
const TOP = 30;

export interface GridDrawing {
  legend: string;
  columns: string[];
  rows: GridRow[];
}

export function gridSvg({ legend, columns, rows }: GridDrawing): SVGSVGElement {
  const svg = document.createElementNS(NAMESPACE, "svg");
  const add = (tag: string, attributes: Record<string, string | number>, text = "") => {
    const element = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
    element.textContent = text;
    svg.append(element);
  };
  const width = Math.max(LEFT + CELL * columns.length + 12, 360);
  const height = TOP + CELL * rows.length + 30;
  svg.setAttribute("class", "plot");
  svg.setAttribute("width", String(width));
  svg.setAttribute("height", String(height));
  const small = { "font-size": 11, fill: "var(--muted)" };
  const centred = { "text-anchor": "middle", "dominant-baseline": "central" };
  add("text", { x: 8, y: height - 10, ...small }, legend);
  columns.forEach((column, j) =>
    add("text", { x: LEFT + CELL * (j + 0.5), y: TOP - 10, ...small, ...centred }, column),
  );
  rows.forEach((row, i) => {
    const y = TOP + CELL * i;
    add("text", { x: LEFT - 16, y: y + CELL / 2, ...small, ...centred }, row.label);
    row.cells.forEach((cell, j) => {
      if (!cell) return;
      const box = { x: LEFT + CELL * j + 1, y: y + 1, width: CELL - 2, height: CELL - 2 };
      const colour = cell.faded ? "var(--faded)" : cell.colour;
      add("rect", { ...box, rx: 3, fill: colour, stroke: cell.marked ? "var(--ink)" : "none", "stroke-width": 2 });
      if (cell.faded) return;
      if (cell.picture) {
        const href = heatUrl(cell.picture.heat, cell.picture.scale);
        add("image", { ...box, href, preserveAspectRatio: "none", "image-rendering": "pixelated" });
      }
      if (cell.letters && cell.picture && cell.badge) {
        const at = { x: box.x + box.width - 8, y: box.y + 6 };
        add("rect", { x: at.x - 8, y: at.y - 6, width: 16, height: 12, rx: 2, fill: cell.badge });
        add("text", { ...at, ...centred, "font-size": 9, fill: inkOn(cell.badge) }, cell.letters);
      } else if (!cell.picture) {
        const middle = { x: LEFT + CELL * (j + 0.5), y: y + CELL / 2 };
        add("text", { ...middle, ...centred, "font-size": 11, fill: inkOn(colour) }, cell.letters);
      }
    });
  });
  return svg;
}
