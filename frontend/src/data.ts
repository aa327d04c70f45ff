/** The page's data as Python writes it (report/payload.py), and the unpacking of its arrays. */

export interface Text {
  en: string;
  zh: string;
}

/** A site's index among `sites`, and a head's number there. */
export type Place = [site: number, head: number];

export interface Packed {
  shape: number[];
  type: "u8" | "f32";
  scale: number[] | null;
  data: string;
}

export interface Facts {
  model: string;
  /** What a command calls the model; null where it was not loaded by a name. */
  name: string | null;
  kind: Text;
  tokens: number;
  documents: number;
  contexts: number;
  context: number;
  seconds: number;
  interrupted: boolean;
  /** The share of the text's tokens that the model's vocabulary does not have. */
  unknown: number;
  intervals_over: string;
  pairs_by: Text | null;
  left_out: Text[];
  versions: Record<string, string>;
  loss: Text | null;
  /** The heads that were removed, merged and grown, by their original numbers; null for a model as it was trained. */
  edits: Text | null;
}

export interface Stack {
  label: Text;
  kind: "self" | "cross";
  sites: number[];
}

export interface Site {
  name: string;
  kind: "self" | "cross";
  stack: string;
  layer: number;
  heads: number;
  /** The number of each head in the unedited model: "5", "2+7" for a merged one, "new". */
  originals: string[];
}

export type NumberFormat = "share" | "number" | "tokens" | "nats";
export type ColumnGroup = "looks" | "writes" | "matters" | "other";

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

export interface Alike {
  place: Place;
  cosine: number;
  across: boolean;
}

export interface Head {
  site: number;
  head: number;
  /** What it was in the unedited model, where it has another number now. */
  origin: Text | null;
  values: Record<string, number | null>;
  spreads: Record<string, number | null>;
  errors: Record<string, number | null>;
  /** What a head would show that looks as often at every token. */
  chances: Record<string, number | null>;
  roles: RoleScore[];
  alike: Alike[];
  top_keys: { text: string; share: number }[];
}

export interface Relation {
  name: string;
  label: Text;
  about: Text;
}

export interface Group {
  heads: Place[];
  least: number;
}

export interface Pair {
  one: Place;
  other: Place;
  cosine: number;
  guess: number | null;
}

export interface SyntaxRow {
  relation: string;
  direction: "head" | "dependent";
  head: Place;
  accuracy: number;
  low: number | null;
  high: number | null;
  baseline: number | null;
  offset: number | null;
  words: number;
  /** Against the best fixed distance, on the same words; empty where they cannot be told apart. */
  verdict: "better" | "worse" | "";
}

export interface Example {
  title: string;
  queries: string[];
  keys: string[];
  sites: Record<string, Packed>;
}

export type ViewName = "head" | "alike" | "matters" | "overview" | "roles";

export interface Finding {
  text: Text;
  kind: string;
  heads: Place[];
  view: ViewName;
  column: string | null;
}

export interface Page {
  format: 1;
  lang: "en" | "zh";
  title: string;
  facts: Facts;
  stacks: Stack[];
  sites: Site[];
  columns: Column[];
  roles: Role[];
  heads: Head[];
  maps: Record<string, Packed>;
  /** How many tokens a side of a map's cell has. */
  map_block?: number;
  offsets: { edges: number[]; sites: Record<string, Packed> };
  relations: Record<string, Record<string, Packed>>;
  relation_names: Relation[];
  likeness: { threshold: number; null: number } | null;
  groups: Group[];
  pairs: Pair[];
  importance: { column: string; label: Text; about: Text } | null;
  syntax: { treebank: string; rows: SyntaxRow[] } | null;
  examples: Example[];
  findings: Finding[];
}

/** A packed array as numbers, in the order of its shape. */
export interface Unpacked {
  shape: number[];
  values: Float32Array;
}

const unpackedBefore = new WeakMap<Packed, Unpacked>();

export function unpack(packed: Packed): Unpacked {
  const known = unpackedBefore.get(packed);
  if (known) return known;
  const letters = atob(packed.data);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
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
  unpackedBefore.set(packed, unpacked);
  return unpacked;
}

/** The part of an array that belongs to one index of its first axis. */
export function part(array: Unpacked, index: number): Unpacked {
  const shape = array.shape.slice(1);
  const each = shape.reduce((product, size) => product * size, 1);
  return { shape, values: array.values.subarray(index * each, (index + 1) * each) };
}
