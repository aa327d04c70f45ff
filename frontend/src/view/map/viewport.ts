/** The visible part of a matrix, and its level of detail. */

/** A pixel is `token * scale + x` across and `token * scale + y` down. */
export interface View {
  x: number;
  y: number;
  scale: number;
}

export interface Size {
  width: number;
  height: number;
}

export interface Matrix {
  queries: number;
  keys: number;
}

export type Span = readonly [first: number, end: number];

const CLOSEST = 40; // maximum pixels per token, more for a few tokens

/** The scale at which the whole matrix fits. */
export function fitting({ queries, keys }: Matrix, { width, height }: Size): number {
  return Math.min(width / Math.max(1, keys), height / Math.max(1, queries));
}

export function closest(matrix: Matrix, size: Size): number {
  return Math.max(CLOSEST, fitting(matrix, size));
}

/** The finest level whose cells, of 2^level tokens per side, are at least a pixel wide. */
export function levelFor(scale: number): number {
  return Math.max(0, Math.ceil(-Math.log2(scale) - 1e-6));
}

/** The finest level with at most `cells` cells per side. */
export function levelOf({ queries, keys }: Matrix, cells: number): number {
  return Math.max(0, Math.ceil(Math.log2(Math.max(queries, keys) / cells)));
}

export function spansOf(view: View, size: Size, matrix: Matrix): { rows: Span; columns: Span } {
  return {
    rows: span(-view.y / view.scale, (size.height - view.y) / view.scale, matrix.queries),
    columns: span(-view.x / view.scale, (size.width - view.x) / view.scale, matrix.keys),
  };
}

function span(from: number, to: number, count: number): Span {
  const first = Math.min(count, Math.max(0, Math.floor(from + 1e-6)));
  return [first, Math.max(first, Math.min(count, Math.ceil(to - 1e-6)))];
}

/** The tiles of a level that intersect a window, the central ones first. */
export function tilesIn(rows: Span, columns: Span, level: number, cells: number): [row: number, column: number][] {
  const side = cells * 2 ** level;
  const found: [number, number][] = [];
  for (let row = Math.floor(rows[0] / side); row * side < rows[1]; row++) {
    for (let column = Math.floor(columns[0] / side); column * side < columns[1]; column++) found.push([row, column]);
  }
  const middle = [(rows[0] + rows[1]) / 2 / side - 0.5, (columns[0] + columns[1]) / 2 / side - 0.5] as const;
  const far = ([row, column]: [number, number]) => (row - middle[0]) ** 2 + (column - middle[1]) ** 2;
  return found.sort((one, other) => far(one) - far(other));
}

const NAME_SIZE = 12; // pixels
const TICK_DISTANCE = 64; // pixels between two numbers

/** The ticks of an axis: every token by name where there is room, else a few by number. */
export function ticksOf(span: Span, scale: number): { named: boolean; ticks: number[] } {
  const named = scale >= NAME_SIZE;
  const step = named ? 1 : tickStep(scale);
  const ticks: number[] = [];
  for (let token = Math.ceil(span[0] / step) * step; token < span[1]; token += step) ticks.push(token);
  return { named, ticks };
}

/** The smallest of 1, 2, 5, 10, ... tokens at which ticks are far enough apart. */
function tickStep(scale: number): number {
  let step = 1;
  for (let i = 0; step * scale < TICK_DISTANCE; i++) step = [1, 2, 5][i % 3]! * 10 ** Math.floor(i / 3);
  return step;
}
