/** The data of the page as report/payload.py writes it, and the unpacking of its arrays. */

export interface Text {
  en: string;
  zh: string;
}

/** Index among the sites of the page, or the layers of the viewer, and number of the head there. */
export type HeadId = readonly [layer: number, head: number];

export interface Packed {
  shape: number[];
  type: "u8" | "f32" | "f64";
  scale: number[] | null;
  data: string;
}

export interface Facts {
  model: string;
  /** The name of the model in commands; null if it was not loaded by name. */
  name: string | null;
  kind: Text;
  tokens: number;
  documents: number;
  contexts: number;
  context: number;
  seconds: number;
  interrupted: boolean;
  /** The share of tokens outside the vocabulary. */
  unknown: number;
  intervals_over: string;
  pairs_by: Text | null;
  left_out: Text[];
  versions: Record<string, string>;
  loss: Text | null;
  /** The heads that were removed, merged and added, by their original numbers; null for an unedited model. */
  edits: Text | null;
}

export interface Stack {
  label: Text;
  kind: "self" | "cross";
  sites: number[];
}

interface Site {
  name: string;
  kind: "self" | "cross";
  stack: string;
  layer: number;
  heads: number;
  /** The number of each head in the unedited model: `5`, `2+7` for a merged head. */
  originals: string[];
}

export type NumberFormat = "share" | "number" | "tokens" | "nats";
/** "companion": the deviation, maximum, error or chance level of another column. */
export type ColumnGroup = "attention" | "output" | "importance" | "other" | "companion";

export interface Column {
  name: string;
  label: Text;
  about: Text;
  group: ColumnGroup;
  format: NumberFormat;
  low: number | null;
  high: number | null;
}

export interface Role {
  name: string;
  letters: string;
  label: Text;
  about: Text;
}

export interface RoleScore {
  role: string;
  score: number | null;
  null: number | null;
  low: number | null;
  high: number | null;
  holds: boolean;
  evidence: Text;
}

export interface Similar {
  head: HeadId;
  cosine: number;
  across: boolean;
}

export interface Head {
  site: number;
  head: number;
  /** Its origin in the unedited model, if its number changed. */
  origin: Text | null;
  roles: RoleScore[];
  similar: Similar[];
  top_keys: { text: string; share: number }[];
}

export interface Relation {
  name: string;
  label: Text;
  about: Text;
}

/** A head whose output the other heads of its layer predict linearly, on held-out tokens. */
export interface RedundantHead {
  head: HeadId;
  /** Predicted by all of them together. */
  share: number;
  /** The head that alone predicts most, its share, and the cosine of the two outputs. */
  other: HeadId;
  alone: number;
  cosine: number;
}

interface Pair {
  one: HeadId;
  other: HeadId;
  cosine: number;
}

export interface SyntaxRow {
  relation: string;
  direction: "head" | "dependent";
  head: HeadId;
  accuracy: number;
  low: number | null;
  high: number | null;
  baseline: number | null;
  offset: number | null;
  words: number;
  /** Compared with the best fixed offset, on the same words; empty without a significant difference. */
  verdict: "better" | "worse" | "";
}

export interface Example {
  title: string;
  queries: string[];
  keys: string[];
  sites: Record<string, Packed>;
}

type ViewName = "head" | "similar" | "importance" | "overview" | "roles";

export interface Finding {
  text: Text;
  kind: string;
  heads: HeadId[];
  view: ViewName;
  column: string | null;
}

export interface Page {
  format: 3;
  lang: "en" | "zh";
  title: string;
  facts: Facts;
  stacks: Stack[];
  sites: Site[];
  columns: Column[];
  roles: Role[];
  heads: Head[];
  /** The numeric columns of heads.parquet, one number per head, as float64. */
  table: Record<string, Packed>;
  maps: Record<string, Packed>;
  /** Tokens per side of a cell of a map. */
  map_block?: number;
  offsets: { edges: number[]; sites: Record<string, Packed> };
  relations: Record<string, Record<string, Packed>>;
  relation_names: Relation[];
  /** The share from which heads are redundant; null if it was not measured. */
  redundancy: number | null;
  redundant: RedundantHead[];
  pairs: Pair[];
  importance: { column: string; label: Text; about: Text } | null;
  syntax: { treebank: string; rows: SyntaxRow[] } | null;
  examples: Example[];
  findings: Finding[];
}

/** An unpacked array, row-major. */
export interface Unpacked {
  shape: number[];
  values: Float32Array;
}

const unpackedCache = new WeakMap<Packed, Unpacked>();

function bytesOf(packed: Packed): Uint8Array {
  const letters = atob(packed.data);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** A column in full precision; null for NaN, which means that a value is undefined or was not computed. */
export function unpackColumn(packed: Packed): (number | null)[] {
  const view = new DataView(bytesOf(packed).buffer);
  return Array.from({ length: view.byteLength / 8 }, (_, i) => {
    const value = view.getFloat64(8 * i, true);
    return Number.isNaN(value) ? null : value;
  });
}

export function unpack(packed: Packed): Unpacked {
  const cached = unpackedCache.get(packed);
  if (cached) return cached;
  const bytes = bytesOf(packed);
  const count = packed.shape.reduce((product, size) => product * size, 1);
  const values = new Float32Array(count);
  if (packed.type === "f32") {
    const view = new DataView(bytes.buffer);
    for (let i = 0; i < count; i++) values[i] = view.getFloat32(4 * i, true);
  } else {
    const first = packed.shape[0] ?? 0;
    const each = count / (first || 1);
    for (let part = 0; part < first; part++) {
      const scale = (packed.scale?.[part] ?? 1) / 255;
      for (let i = part * each; i < (part + 1) * each; i++) values[i] = (bytes[i] as number) * scale;
    }
  }
  const unpacked = { shape: packed.shape, values };
  unpackedCache.set(packed, unpacked);
  return unpacked;
}

/** True if any value is not a number: a NaN of the model, which is shown as such and never as 0. */
export function hasNaN(values: ArrayLike<number>): boolean {
  return Array.prototype.some.call(values, Number.isNaN);
}

/** The slice at one index of the first axis. */
export function part(array: Unpacked, index: number): Unpacked {
  const shape = array.shape.slice(1);
  const each = shape.reduce((product, size) => product * size, 1);
  return { shape, values: array.values.subarray(index * each, (index + 1) * each) };
}
