/** The visible part of a map for a file, with its axes and legend. */
import { addRamp, CENTRED, createSvg, type Attributes } from "../../parts/svg";
import { plainToken } from "../../parts/tokens";
import { drawMap, type Colours } from "./drawing";
import type { HeadSource } from "./source";
import { ticksOf, spansOf, type Size, type View } from "./viewport";

const [LEFT, TOP, RIGHT] = [112, 112, 16];
const FOOT = 44; // height of the legend
const PIXEL_RATIO = 2;
const MAX_LETTERS = 14; // of a token on an axis

interface MapDrawing {
  source: HeadSource;
  view: View;
  size: Size;
  colours: Colours;
  queries: string[];
  keys: string[];
  across: string;
  down: string;
  /** Formatting of positions and of shares. */
  count: (token: number) => string;
  share: (value: number) => string;
}

export function mapSvg(drawn: MapDrawing): SVGSVGElement {
  const { source, view, size, colours, count, share } = drawn;
  const { svg, add } = createSvg(LEFT + size.width + RIGHT, TOP + size.height + FOOT);
  const canvas = document.createElement("canvas");
  drawMap(canvas, source, view, size, colours, PIXEL_RATIO);
  const href = canvas.toDataURL("image/png");
  add("image", { x: LEFT, y: TOP, width: size.width, height: size.height, href, "image-rendering": "pixelated" });
  const frame = { fill: "none", stroke: "var(--line)", "stroke-width": 1 };
  add("rect", { x: LEFT, y: TOP, width: size.width, height: size.height, ...frame });

  const { rows, columns } = spansOf(view, size, source.matrix);
  const name = (tokens: string[], token: number) => plainToken(tokens[token] ?? "", MAX_LETTERS);
  const down = ticksOf(rows, view.scale);
  for (const token of down.ticks) {
    const y = (token + (down.named ? 0.5 : 0)) * view.scale + view.y;
    if (y < 0 || y > size.height) continue;
    const at = { x: LEFT - 6, y: TOP + y, "text-anchor": "end", "dominant-baseline": "central" };
    add("text", { ...at, ...label(view.scale, down.named) }, down.named ? name(drawn.queries, token) : count(token));
  }
  const across = ticksOf(columns, view.scale);
  for (const token of across.ticks) {
    const x = LEFT + (token + (across.named ? 0.5 : 0)) * view.scale + view.x;
    if (x < LEFT || x > LEFT + size.width) continue;
    const at: Attributes = across.named
      ? { x, y: TOP - 6, transform: `rotate(-90 ${x} ${TOP - 6})`, "dominant-baseline": "central" }
      : { x, y: TOP - 10, ...CENTRED };
    add("text", { ...at, ...label(view.scale, across.named) }, across.named ? name(drawn.keys, token) : count(token));
  }
  const names = { "font-size": 12, fill: "var(--ink)" };
  add("text", { x: LEFT, y: 16, ...names }, `${drawn.across} →`);
  add("text", { x: 16, y: TOP, transform: `rotate(-90 16 ${TOP})`, "text-anchor": "end", ...names }, `← ${drawn.down}`);

  addRamp(add, { scale: colours.scale, format: share }, LEFT, TOP + size.height + 14);
  return svg;
}

function label(scale: number, named: boolean): Attributes {
  return { "font-size": named ? Math.min(12, 0.85 * scale) : 11, fill: "var(--muted)" };
}
