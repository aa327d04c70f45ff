/** A rectangle of a matrix at one level of detail, as numbers and as an image with one pixel per cell. */
import type { Unpacked } from "../../data";
import type { Scale } from "../../parts/colour";
import { paintCells } from "../../parts/heat-map";
import type { Pool } from "../types";
import type { Matrix } from "./viewport";

const UNPAINTED = 1;
const PAINTED = 2;

export class MapTile {
  readonly block: number;
  private readonly canvas = document.createElement("canvas");
  private readonly values: Float32Array;
  private readonly rowStates: Uint8Array; // of each row: 0 without values, UNPAINTED or PAINTED
  private scale: Scale | null = null;

  /** Starts at a token of each axis; cells are squares of 2^level tokens. */
  constructor(
    readonly level: number,
    readonly firstQuery: number,
    readonly firstKey: number,
    readonly rows: number,
    readonly columns: number,
    readonly exact: boolean,
  ) {
    this.block = 2 ** level;
    this.values = new Float32Array(rows * columns);
    this.rowStates = new Uint8Array(rows);
    this.canvas.width = Math.max(1, columns);
    this.canvas.height = Math.max(1, rows);
  }

  /** An empty tile of the whole matrix. */
  static whole(matrix: Matrix, level: number, exact: boolean): MapTile {
    const cells = (tokens: number) => Math.ceil(tokens / 2 ** level);
    return new MapTile(level, 0, 0, cells(matrix.queries), cells(matrix.keys), exact);
  }

  /** Sets rows of cells. A sum becomes the mean per query, so that cells of all sizes are comparable. */
  fill(first: number, cells: Unpacked, pool: Pool, matrix: Matrix): void {
    const rows = Math.min(cells.shape[0] ?? 0, this.rows - first);
    for (let row = first; row < first + rows; row++) {
      const queries = Math.min(this.block, matrix.queries - this.firstQuery - row * this.block);
      const divisor = pool === "sum" ? Math.max(1, queries) : 1;
      const from = (row - first) * this.columns;
      for (let i = 0; i < this.columns; i++) {
        this.values[row * this.columns + i] = (cells.values[from + i] ?? 0) / divisor;
      }
      this.rowStates[row] = UNPAINTED;
    }
  }

  /** The image in the colours of a scale; only new rows are painted. */
  painted(scale: Scale): HTMLCanvasElement {
    if (scale !== this.scale) this.rowStates.forEach((state, row) => (this.rowStates[row] = state && UNPAINTED));
    this.scale = scale;
    const { columns } = this;
    for (let row = 0; row < this.rows; row++) {
      const first = row;
      while (row < this.rows && this.rowStates[row] === UNPAINTED) this.rowStates[row++] = PAINTED;
      const values = this.values.subarray(first * columns, row * columns);
      paintCells(this.canvas, { rows: row - first, columns, values }, scale, first);
    }
    return this.canvas;
  }

  /** The value of the cell of a query and a key; null if unknown. */
  at(query: number, key: number): number | null {
    const row = Math.floor((query - this.firstQuery) / this.block);
    const column = Math.floor((key - this.firstKey) / this.block);
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns || !this.rowStates[row]) return null;
    return this.values[row * this.columns + column] ?? null;
  }
}
