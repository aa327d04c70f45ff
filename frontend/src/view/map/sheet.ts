/** A rectangle of a matrix at one level of detail: shares of attention, and a picture with a pixel a cell. */
import type { Unpacked } from "../../data";
import type { Scale } from "../../parts/colour";
import type { Pool } from "../types";
import type { Matrix } from "./viewport";

const FRESH = 1;
const PAINTED = 2;

export class Sheet {
  private readonly canvas = document.createElement("canvas");
  private readonly values: Float32Array;
  private readonly filled: Uint8Array; // of each row: nothing, numbers, or numbers and colours
  private scale: Scale | null = null;

  /** Begins at a token of each axis; cells are squares of 2^level tokens. */
  constructor(
    readonly level: number,
    readonly firstQuery: number,
    readonly firstKey: number,
    readonly rows: number,
    readonly columns: number,
    readonly exact: boolean,
  ) {
    this.values = new Float32Array(rows * columns);
    this.filled = new Uint8Array(rows);
    this.canvas.width = Math.max(1, columns);
    this.canvas.height = Math.max(1, rows);
  }

  /** A sheet of the whole matrix, empty as yet. */
  static whole(matrix: Matrix, level: number, exact: boolean): Sheet {
    const cells = (tokens: number) => Math.ceil(tokens / 2 ** level);
    return new Sheet(level, 0, 0, cells(matrix.queries), cells(matrix.keys), exact);
  }

  get block(): number {
    return 2 ** this.level;
  }

  /** Takes rows of cells. A sum becomes the mean share of its queries, so that cells of all sizes read alike. */
  fill(first: number, cells: Unpacked, pool: Pool, matrix: Matrix): void {
    const rows = Math.min(cells.shape[0] ?? 0, this.rows - first);
    for (let row = first; row < first + rows; row++) {
      const queries = Math.min(this.block, matrix.queries - this.firstQuery - row * this.block);
      const divisor = pool === "sum" ? Math.max(1, queries) : 1;
      const from = (row - first) * this.columns;
      for (let i = 0; i < this.columns; i++) {
        this.values[row * this.columns + i] = (cells.values[from + i] ?? 0) / divisor;
      }
      this.filled[row] = FRESH;
    }
  }

  /** The picture in the colours of a scale; rows that have them already are left as they are. */
  painted(scale: Scale): HTMLCanvasElement {
    if (scale !== this.scale) this.filled.forEach((state, row) => (this.filled[row] = state && FRESH));
    this.scale = scale;
    for (let row = 0; row < this.rows; row++) {
      const first = row;
      while (row < this.rows && this.filled[row] === FRESH) this.filled[row++] = PAINTED;
      if (row > first) this.paint(scale, first, row - first);
    }
    return this.canvas;
  }

  /** The share of the cell that holds a token of each axis; null where it is not known. */
  at(query: number, key: number): number | null {
    const row = Math.floor((query - this.firstQuery) / this.block);
    const column = Math.floor((key - this.firstKey) / this.block);
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns || !this.filled[row]) return null;
    return this.values[row * this.columns + column] ?? null;
  }

  private paint(scale: Scale, first: number, rows: number): void {
    const context = this.canvas.getContext("2d");
    if (!context || rows < 1 || this.columns < 1) return;
    const image = context.createImageData(this.columns, rows);
    const start = first * this.columns;
    for (let i = 0; i < rows * this.columns; i++) {
      const colour = scale.paint(this.values[start + i]);
      image.data[4 * i] = colour[0];
      image.data[4 * i + 1] = colour[1];
      image.data[4 * i + 2] = colour[2];
      image.data[4 * i + 3] = 255;
    }
    context.putImageData(image, 0, first);
  }
}
