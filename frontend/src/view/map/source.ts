/** Cells of the map of one head: the whole matrix first as an estimate, then exact, and finer tiles on demand. */
import { hasNaN, unpack, type HeadId, type Packed } from "../../data";
import { request, ServerError, type Message } from "../api";
import type { Pool, Precision, Progress, State, Tile, Trace } from "../types";
import { MapTile } from "./tile";
import { levelOf, tilesIn, type Matrix, type Span } from "./viewport";

const CONCURRENT = 4; // requests
const MAX_TILES = 96; // of half a megabyte each with their image
const SAMPLES = 48; // per side, of the cells that determine the colour range

export interface CellValue {
  share: number;
  /** Tokens per side of the cell. */
  block: number;
  exact: boolean;
}

interface SourceOptions {
  trace: Trace;
  head: HeadId;
  pool: Pool;
  matrix: Matrix;
  limits: State["limits"];
  onChange: () => void;
  onError: (error: unknown) => void;
}

export class HeadSource {
  readonly matrix: Matrix;
  progress: Progress | null = null;
  done = false;
  /** True if a cell is not a number. */
  hasNaN = false;
  private estimate: MapTile | null = null;
  private picture: MapTile | null = null;
  private tiles = new Map<string, MapTile>();
  private loading = new Map<string, AbortController>();
  private waiting: [level: number, row: number, column: number][] = [];
  private readonly controller = new AbortController();
  private readonly body: object;
  private readonly pictureLevel: number;

  constructor(private readonly options: SourceOptions) {
    const { trace, head, pool, matrix, limits } = options;
    this.matrix = matrix;
    this.body = { trace: trace.id, layer: head[0], head: head[1], pool };
    this.pictureLevel = levelOf(matrix, limits.picture_cells);
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

  get pendingTiles(): number {
    return this.loading.size + this.waiting.length;
  }

  /** The tiles to draw, the coarsest first, without those finer than a level. */
  tilesAt(level: number): MapTile[] {
    const tiles = [...this.tiles.values()].filter((tile) => tile.level >= level);
    tiles.sort((one, other) => other.level - one.level);
    return [this.estimate, this.picture, ...tiles].filter((tile) => tile !== null);
  }

  /** Requests the tiles of a window, and aborts requests for others. */
  request(rows: Span, columns: Span, level: number): void {
    const wanted = level < this.pictureLevel ? tilesIn(rows, columns, level, this.options.limits.tile_cells) : [];
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
        this.tiles.delete(key); // moved to the end: the least recently used is evicted first
        this.tiles.set(key, known);
      } else if (!this.loading.has(key)) this.waiting.push([level, row, column]);
    }
    this.fetchNext();
  }

  /** The drawn value of a query and a key. */
  at(query: number, key: number, level: number): CellValue | null {
    for (const tile of this.tilesAt(level).reverse()) {
      const share = tile.at(query, key);
      if (share !== null) return { share, block: tile.block, exact: tile.exact };
    }
    return null;
  }

  /** The 99th percentile of the nonzero values in a window. */
  bright(rows: Span, columns: Span, level: number): number {
    const tiles = this.tilesAt(level).reverse();
    const shares: number[] = [];
    const step = (span: Span) => Math.max(1, (span[1] - span[0]) / SAMPLES);
    for (let query = rows[0]; query < rows[1]; query += step(rows)) {
      for (let key = columns[0]; key < columns[1]; key += step(columns)) {
        let share: number | null = null;
        for (const tile of tiles) if ((share = tile.at(query, key)) !== null) break;
        if (share) shares.push(share);
      }
    }
    shares.sort((one, other) => one - other);
    return shares[Math.floor(0.99 * shares.length)] ?? 1;
  }

  private fill(tile: MapTile | null, first: number, weights: Packed): void {
    const cells = unpack(weights);
    this.hasNaN ||= hasNaN(cells.values);
    tile?.fill(first, cells, this.options.pool, this.matrix);
  }

  private async fetchPicture(): Promise<void> {
    try {
      await request("picture", this.body, this.controller.signal, (message) => this.receive(message));
      this.done = true;
      this.progress = null;
      this.options.onChange();
    } catch (error) {
      this.options.onError(error);
    }
  }

  private receive(message: Message): void {
    const precision = message.precision as Precision | undefined;
    if (precision) {
      const tile = MapTile.whole(this.matrix, message.level as number, precision.exact);
      if (message.weights) this.fill(tile, 0, message.weights as Packed);
      if (precision.exact) this.picture = tile;
      else this.estimate = tile;
    }
    const strip = message.strip as { first: number; weights: Packed } | undefined;
    if (strip) this.fill(this.picture, strip.first, strip.weights);
    if (message.progress) this.progress = message.progress;
    this.options.onChange();
  }

  private fetchNext(): void {
    while (this.loading.size < CONCURRENT) {
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
      const body = { ...this.body, level, row, column };
      const { rows, columns, weights } = await request<Tile>("tile", body, controller.signal);
      const [height = 0, width = 0] = weights.shape;
      const tile = new MapTile(level, rows[0], columns[0], height, width, true);
      this.fill(tile, 0, weights);
      this.tiles.set(key, tile);
      for (const oldest of this.tiles.keys()) if (this.tiles.size > MAX_TILES) this.tiles.delete(oldest);
    } catch (error) {
      this.options.onError(error);
      // Without a server or its text the other requests would fail too.
      if (error instanceof ServerError && ["offline", "gone"].includes(error.kind)) this.waiting = [];
    } finally {
      if (this.loading.get(key) === controller) this.loading.delete(key);
    }
    this.fetchNext();
    this.options.onChange();
  }
}
