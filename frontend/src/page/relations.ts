/** Similarity of the pairs of heads of a layer. */
import { unpack, type HeadId } from "../data";
import type { Model } from "./model";

/** The relation by which a smaller number means more similar. */
const DISTANCE = "attention_distance";
/** The relation that is not symmetric: of the first head by the second. */
const DIRECTED = "predictable_share";
export const DEFAULT_RELATION = "cosine";

export interface HeadPair {
  one: HeadId;
  other: HeadId;
  value: number;
  /** Larger means more similar, or opposite. */
  similarity: number;
}

/** All pairs of heads of a layer, the most similar first. */
export function pairsOf(model: Model, relation: string): HeadPair[] {
  const pairs: HeadPair[] = [];
  for (const [site, relations] of Object.entries(model.page.relations)) {
    const packed = relations[relation];
    if (!packed) continue;
    const { shape, values } = unpack(packed);
    const heads = shape[0] ?? 0;
    for (let i = 0; i < heads; i++) {
      for (let j = relation === DIRECTED ? 0 : i + 1; j < heads; j++) {
        const value = values[i * heads + j] ?? NaN;
        if (i === j || !Number.isFinite(value)) continue;
        const similarity = relation === DISTANCE ? -value : relation === DEFAULT_RELATION ? Math.abs(value) : value;
        pairs.push({ one: [Number(site), i], other: [Number(site), j], value, similarity });
      }
    }
  }
  return bySimilarity(pairs);
}

/** Pairs of heads of different layers. */
export function pairsAcross(model: Model): HeadPair[] {
  return model.page.pairs.map(({ one, other, cosine }) => ({
    one,
    other,
    value: cosine,
    similarity: Math.abs(cosine),
  }));
}

/** The pair of the largest |cosine| of all. */
export function mostSimilar(model: Model): HeadPair | undefined {
  return bySimilarity([...pairsOf(model, DEFAULT_RELATION), ...pairsAcross(model)])[0];
}

function bySimilarity(pairs: HeadPair[]): HeadPair[] {
  return pairs.sort((one, other) => other.similarity - one.similarity);
}

/** The range of a relation over all layers, without the diagonals. */
export function rangeOf(pairs: HeadPair[]): [low: number, high: number] {
  if (!pairs.length) return [0, 1];
  const values = pairs.map((pair) => pair.value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return [Math.min(0, low), high > low ? high : low + 1];
}
