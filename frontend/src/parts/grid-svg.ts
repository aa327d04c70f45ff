/** The grid of heads for a file. */
import { textColourOn } from "./colour";
import type { GridCell, GridRow } from "./head-grid";
import { heatUrl } from "./heat-map";
import { addMissing, addRamp, CENTRED, createSvg, RAMP_HEIGHT, widthOf, type Box } from "./svg";
import type { Drawing, Ramp } from "./svg";

const LEFT = 52;
const TOP = 44;
const CELL = { width: 30, height: 30 };
const MAX_LEGEND = 640; // pixels to which a file is widened for its legend
const LINE = 11; // height of a line of a badge

interface GridDrawing {
  legend: string;
  /** Colour scale of the cells, if they have one in common. */
  ramp?: Ramp;
  columns: string[];
  rows: GridRow[];
  axes: { across: string; down: string };
  /** Size of a cell in pixels. */
  cell?: { width: number; height: number };
}

export function gridSvg({ legend, ramp, columns, rows, axes, cell = CELL }: GridDrawing): SVGSVGElement {
  const width = Math.max(LEFT + cell.width * columns.length + 12, 360, Math.min(MAX_LEGEND, widthOf(legend) + 16));
  const bottom = TOP + cell.height * rows.length;
  const height = bottom + 30 + (ramp ? RAMP_HEIGHT : 0);
  const drawing = createSvg(width, height);
  const { svg, add } = drawing;
  const small = { "font-size": 11, fill: "var(--muted)" };
  add("text", { x: 8, y: bottom + 20, ...small }, legend);
  if (ramp) addRamp(add, ramp, 8, bottom + 30);
  const middle = { across: LEFT + (cell.width * columns.length) / 2, down: TOP + (cell.height * rows.length) / 2 };
  add("text", { x: middle.across, y: 14, ...small, ...CENTRED }, axes.across);
  const turned = { transform: `rotate(-90 14 ${middle.down})` };
  add("text", { x: 14, y: middle.down, ...turned, ...small, ...CENTRED }, axes.down);
  columns.forEach((column, j) =>
    add("text", { x: LEFT + cell.width * (j + 0.5), y: TOP - 10, ...small, ...CENTRED }, column),
  );
  rows.forEach((row, i) => {
    const y = TOP + cell.height * i;
    add("text", { x: LEFT - 16, y: y + cell.height / 2, ...small, ...CENTRED }, row.label);
    row.cells.forEach((each, j) => {
      const box = { x: LEFT + cell.width * j + 1, y: y + 1, width: cell.width - 2, height: cell.height - 2 };
      if (each) drawCell(drawing, each, box);
    });
  });
  return svg;
}

function drawCell({ add }: Drawing, cell: GridCell, box: Box): void {
  const colour = cell.faded ? "var(--faded)" : cell.colour;
  if (cell.missing && !cell.faded) addMissing(add, box, colour);
  else add("rect", { ...box, rx: 3, fill: colour });
  if (cell.marked) add("rect", { ...box, rx: 3, fill: "none", stroke: "var(--ink)", "stroke-width": 2 });
  if (cell.faded) return;
  if (cell.picture) {
    const href = heatUrl(cell.picture.heat, cell.picture.scale);
    add("image", { ...box, href, preserveAspectRatio: "none", "image-rendering": "pixelated" });
  }
  if (cell.letters && cell.picture && cell.badge) drawBadge({ add }, cell.letters.split("\n"), cell.badge, box);
  else if (!cell.picture) {
    const middle = { x: box.x + box.width / 2, y: box.y + box.height / 2 };
    add("text", { ...middle, ...CENTRED, "font-size": 11, fill: textColourOn(colour) }, cell.letters);
  }
  if (cell.ablated) {
    const [right, bottom] = [box.x + box.width, box.y + box.height];
    const cross = { stroke: "var(--second)", "stroke-width": 2 };
    add("line", { x1: box.x, y1: box.y, x2: right, y2: bottom, ...cross });
    add("line", { x1: box.x, y1: bottom, x2: right, y2: box.y, ...cross });
  }
}

/** One line is drawn in the upper corner, several across the lower edge. */
function drawBadge({ add }: Pick<Drawing, "add">, lines: string[], background: string, box: Box): void {
  const several = lines.length > 1;
  const width = several ? box.width : 16;
  const height = LINE * lines.length + 1;
  const x = box.x + box.width - width;
  const y = several ? box.y + box.height - height : box.y;
  add("rect", { x, y, width, height, rx: several ? 0 : 2, fill: background });
  lines.forEach((line, i) => {
    const at = { x: x + width / 2, y: y + LINE * (i + 0.5) + 0.5 };
    add("text", { ...at, ...CENTRED, "font-size": 9, fill: textColourOn(background) }, line);
  });
}
