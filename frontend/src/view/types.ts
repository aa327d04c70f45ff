/** What the viewer's server says (report/viewer/), as values. */
import type { Packed, Text } from "../data";

/** A place's index among `state.places`, and a head's number there. */
export type HeadAt = readonly [place: number, head: number];
export type Slot = "A" | "B";
export type AxisName = "text" | "target";
export type Pool = "sum" | "max";

export interface Axis {
  tokens: string[];
  /** Indices of tokens that stand for no text. */
  special: number[];
  /** Code points in the text; -1 for tokens that stand for none of it. */
  start: number[];
  end: number[];
}

export interface Candidate {
  id: number;
  text: string;
  probability: number | null;
}

export interface TokenOutput {
  kind: "next-token" | "masked-token";
  position: number;
  top: Candidate[];
  entropy: number | null;
  greedy: number;
}

export interface VectorOutput {
  kind: "vector";
  size: number;
  of: "mean" | "last";
}

export type Output = TokenOutput | VectorOutput;

export interface Reading {
  id: number;
  slot: Slot;
  text: Axis;
  /** What the decoder of an encoder-decoder has read or written. */
  target: Axis | null;
  cut: { tokens_in_text: number; tokens_read: number } | null;
  off: HeadAt[];
  generated: number;
  output: Output;
  bytes: number;
  seconds: number;
}

export interface PlaceInfo {
  name: string;
  kind: "self" | "cross";
  stack: string;
  layer: number;
  heads: number;
  /** What each head was in the unedited model; null for one that has its number from the beginning. */
  origins: (Text | null)[];
  call: number;
  queries: AxisName;
  keys: AxisName;
  run_site: number | null;
}

export interface State {
  format: 1;
  lang: "en" | "zh";
  version: string;
  model: {
    name: string;
    kind: string;
    class: string;
    origin: string;
    device: string;
    dtype: string;
    parameters: number;
  };
  context: number;
  context_reason: "trained" | "memory" | "requested";
  output: Output["kind"];
  generates: boolean;
  stacks: { name: string; kind: "self" | "cross"; places: number[] }[];
  places: PlaceInfo[];
  limits: { picture_cells: number; tile_cells: number; window_tokens: number; word_cells: number };
  readings: Record<Slot, Reading | null>;
  /** The heads that were removed, merged and grown; null for a model as it was trained. */
  edits: Text | null;
  run: boolean;
}

export interface Progress {
  step: string;
  done: number;
  total: number;
  unit: string;
}

export interface How {
  kind: "weights" | "blocks" | "estimate";
  exact: boolean;
  /** How many tokens a side of a cell has. */
  block: number;
  rule: { text: string; every: number; rows: number } | null;
}

/** One token's weights along the other tokens, in every head of a place. */
export interface WeightRow {
  weights: Packed;
  block: number;
  top: { tokens: number[][]; weights: number[][] };
}

export interface WordLine {
  place: number;
  attends: WeightRow | null;
  attended: WeightRow | null;
}

export interface Change {
  id: number;
  text: string;
  before: number | null;
  after: number | null;
}

export interface Difference {
  divergence: number | null;
  cosine: number | null;
  top: Change[] | null;
}

export interface Effect extends Difference {
  before: Output;
  after: Output;
}

export interface Tile {
  rows: [number, number];
  columns: [number, number];
  block: number;
  weights: Packed;
}

export const headKey = ([place, head]: HeadAt): string => `${place}.${head}`;

export function headOf(key: string): HeadAt {
  const [place, head] = key.split(".").map(Number);
  return [place ?? 0, head ?? 0];
}

export function axisOf(reading: Reading, name: AxisName): Axis {
  return name === "target" && reading.target ? reading.target : reading.text;
}
