/** The messages of the viewer's server (report/viewer/). */
import type { HeadId, Packed, Text } from "../data";

export type Slot = "A" | "B";
export type AxisName = "text" | "target";
export type Pool = "sum" | "max";

export interface Axis {
  tokens: string[];
  /** Indices of special tokens. */
  special: number[];
  /** Span in code points of the text; -1 for tokens without one. */
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

/** A text that was run through the model. */
export interface Trace {
  id: number;
  slot: Slot;
  text: Axis;
  /** What the decoder of an encoder-decoder has generated. */
  target: Axis | null;
  cut: { tokens_in_text: number; tokens_read: number } | null;
  ablated: HeadId[];
  generated: number;
  output: TokenOutput | VectorOutput;
  bytes: number;
  seconds: number;
}

export interface LayerInfo {
  stack: string;
  /** Index in its stack. */
  depth: number;
  heads: number;
  /** The origin of each head in the unedited model; null if its number did not change. */
  origins: (Text | null)[];
  queries: AxisName;
  keys: AxisName;
  /** Index among the sites of the run. */
  run_site: number | null;
}

export interface State {
  lang: "en" | "zh";
  version: string;
  model: { name: string; kind: string; class: string; device: string; dtype: string; parameters: number };
  context: number;
  context_reason: "trained" | "memory" | "requested";
  generates: boolean;
  stacks: { name: string; kind: "self" | "cross"; layers: number[] }[];
  layers: LayerInfo[];
  limits: { picture_cells: number; tile_cells: number; word_cells: number };
  traces: Record<Slot, Trace | null>;
  /** The heads that were removed, merged and added; null for an unedited model. */
  edits: Text | null;
  run: boolean;
}

export interface Progress {
  step: string;
  done: number;
  total: number;
  unit: string;
}

export interface Precision {
  kind: "weights" | "blocks" | "estimate";
  exact: boolean;
  /** Tokens per side of a cell. */
  block: number;
  rule: { every: number; rows: number } | null;
}

/** The weights between one token and all others, in every head of a layer. */
export interface WeightRow {
  weights: Packed;
  block: number;
  top: { tokens: number[][]; weights: number[][] };
}

export interface TokenRow {
  layer: number;
  attends: WeightRow | null;
  attended: WeightRow | null;
}

export interface Difference {
  divergence: number | null;
  cosine: number | null;
  top: { id: number; text: string; before: number | null; after: number | null }[] | null;
}

export interface Tile {
  rows: [number, number];
  columns: [number, number];
  weights: Packed;
}

export const headKey = ([layer, head]: HeadId): string => `${layer}.${head}`;

export function headOf(key: string): HeadId {
  const [layer, head] = key.split(".").map(Number);
  return [layer ?? 0, head ?? 0];
}

export function axisOf(trace: Trace, name: AxisName): Axis {
  return name === "target" && trace.target ? trace.target : trace.text;
}

/** The text of a token; undefined if there is none. */
export function tokenAt(trace: Trace, { axis, index }: TokenId): string | undefined {
  return axisOf(trace, axis).tokens[index];
}

export interface TokenId {
  axis: AxisName;
  index: number;
}
