/** Where the cells of one head come from: the whole at once as an estimate, then exactly; finer tiles on demand. */
import { unpack, type Packed } from "../../data";
import { ask, follow, ServerError, type Line } from "../api";
import type { HeadAt, How, Pool, Progress, Reading, State, Tile } from "../types";
import { Sheet } from "./sheet";
import { levelOf, tilesIn, type Matrix, type Span } from "./viewport";

const AT_ONCE = 4;
const KEPT = 96; // tiles, of half a megabyte each with their picture

const SAMPLES = 48; // a side, of the cells by which colours are chosen

export interface Found {
  share: number;
  /** How many tokens a side of the cell has. */
  block: number;
  exact: boolean;
}

export class HeadSource {
  progress: Progress | null = null;
  done = false;
  private estimate: Sheet | null = null;
  private picture: Sheet | null = null;
  private tiles = new Map<string, Sheet>();
  private loading = new Map<string, AbortController>();
  private waiting: [level: number, row: number, column: number][] = [];
  private readonly controller = new AbortController();
  private readonly asked: object;
  private readonly pictureLevel: number;
  private readonly tileCells: number;

  constructor(
    reading: Reading,
    head: HeadAt,
    readonly pool: Pool,
    readonly matrix: Matrix,
    limits: State["limits"],
    private readonly onChange: () => void,
    private readonly onError: (error: unknown) => void,
  ) {
    this.asked = { reading: reading.id, place: head[0], head: head[1], pool };
    this.pictureLevel = levelOf(matrix, limits.picture_cells);
    this.tileCells = limits.tile_cells;
    void this.fetchPicture();
  }

  stop(): void {
    this.controller.abort();
    for (const loading of this.loading.values()) loading.abort();
    this.waiting = [];
  }

  get hasEstimate(): boolean {
    return this.estimate !== null;
  }

  get tilesOnTheirWay(): number {
    return this.loading.size + this.waiting.length;
  }

  /** What there is to draw, the coarsest first; tiles that are finer than a level asked for are left out. */
  sheets(level: number): Sheet[] {
    const tiles = [...this.tiles.values()].filter((tile) => tile.level >= level);
    tiles.sort((one, other) => other.level - one.level);
    return [this.estimate, this.picture, ...tiles].filter((sheet) => sheet !== null);
  }

  /** Asks for the tiles of a window; those that left it are called off. */
  want(rows: Span, columns: Span, level: number): void {
    const wanted = level < this.pictureLevel ? tilesIn(rows, columns, level, this.tileCells) : [];
    const keys = new Set(wanted.map(([row, column]) => `${level}/${row}/${column}`));
    for (const [key, loading] of this.loading) {
      if (!keys.has(key)) {
        loading.abort();
        this.loading.delete(key);
      }
    }
    this.waiting = [];
    for (const [row, column] of wanted) {
      const key = `${level}/${row}/${column}`;
      const known = this.tiles.get(key);
      if (known) {
        this.tiles.delete(key); // and again at the end: the longest unseen is dropped first
        this.tiles.set(key, known);
      } else if (!this.loading.has(key)) this.waiting.push([level, row, column]);
    }
    this.next();
  }

  /** The number that is drawn for two tokens. */
  at(query: number, key: number, level: number): Found | null {
    for (const sheet of this.sheets(level).reverse()) {
      const share = sheet.at(query, key);
      if (share !== null) return { share, block: sheet.block, exact: sheet.exact };
    }
    return null;
  }

  /** The share that one in a hundred of the cells in a window exceeds, among those that are looked at at all. */
  bright(rows: Span, columns: Span, level: number): number {
    const sheets = this.sheets(level).reverse();
    const shares: number[] = [];
    const step = (span: Span) => Math.max(1, (span[1] - span[0]) / SAMPLES);
    for (let query = rows[0]; query < rows[1]; query += step(rows)) {
      for (let key = columns[0]; key < columns[1]; key += step(columns)) {
        let share: number | null = null;
        for (const sheet of sheets) if ((share = sheet.at(query, key)) !== null) break;
        if (share) shares.push(share);
      }
    }
    shares.sort((one, other) => one - other);
    return shares[Math.floor(0.99 * shares.length)] ?? 1;
  }

  private async fetchPicture(): Promise<void> {
    try {
      await follow("picture", this.asked, (line) => this.take(line), this.controller.signal);
      this.done = true;
      this.progress = null;
      this.onChange();
    } catch (error) {
      this.onError(error);
    }
  }

  private take(line: Line): void {
    const how = line.how as How | undefined;
    if (how) {
      const sheet = Sheet.whole(this.matrix, line.level as number, how.exact);
      if (line.weights) sheet.fill(0, unpack(line.weights as Packed), this.pool, this.matrix);
      if (how.exact) this.picture = sheet;
      else this.estimate = sheet;
    }
    const strip = line.strip as { first: number; weights: Packed } | undefined;
    if (strip) this.picture?.fill(strip.first, unpack(strip.weights), this.pool, this.matrix);
    if (line.progress) this.progress = line.progress;
    this.onChange();
  }

  private next(): void {
    while (this.loading.size < AT_ONCE) {
      const tile = this.waiting.shift();
      if (!tile) return;
      void this.fetchTile(...tile);
    }
  }

  private async fetchTile(level: number, row: number, column: number): Promise<void> {
    const key = `${level}/${row}/${column}`;
    const controller = new AbortController();
    this.loading.set(key, controller);
    try {
      const tile = await ask<Tile>("tile", { ...this.asked, level, row, column }, controller.signal);
      const cells = unpack(tile.weights);
      const [rows = 0, columns = 0] = cells.shape;
      const sheet = new Sheet(level, tile.rows[0], tile.columns[0], rows, columns, true);
      sheet.fill(0, cells, this.pool, this.matrix);
      this.tiles.set(key, sheet);
      this.forget();
    } catch (error) {
      this.onError(error);
      // Without a server or its text the others would only fail too.
      if (error instanceof ServerError && ["offline", "gone"].includes(error.kind)) this.waiting = [];
    } finally {
      if (this.loading.get(key) === controller) this.loading.delete(key);
    }
    this.next();
    this.onChange();
  }

  private forget(): void {
    for (const key of this.tiles.keys()) {
      if (this.tiles.size <= KEPT) return;
      this.tiles.delete(key);
    }
  }
}
