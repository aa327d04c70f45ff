/** How two heads of a layer relate, number by number. */
import { unpack, type Place } from "../data";
import type { Model } from "./model";

/** Of this relation a smaller number means more alike. */
const DISTANCE = "attention_distance";

export interface HeadPair {
  one: Place;
  other: Place;
  value: number;
  /** Larger is more alike. */
  near: number;
}

export function isDistance(relation: string): boolean {
  return relation === DISTANCE;
}

/** Every two heads of a layer, the most alike first. */
export function pairsOf(model: Model, relation: string): HeadPair[] {
  const pairs: HeadPair[] = [];
  for (const [site, relations] of Object.entries(model.page.relations)) {
    const packed = relations[relation];
    if (!packed) continue;
    const { shape, values } = unpack(packed);
    const heads = shape[0] ?? 0;
    for (let i = 0; i < heads; i++) {
      for (let j = i + 1; j < heads; j++) {
        const value = values[i * heads + j] ?? NaN;
        if (!Number.isFinite(value)) continue;
        const near = isDistance(relation) ? -value : value;
        pairs.push({ one: [Number(site), i], other: [Number(site), j], value, near });
      }
    }
  }
  return pairs.sort((one, other) => other.near - one.near);
}

/** By what heads are called alike unless a reader chooses otherwise. */
export const PREFERRED = "cosine";

/** Pairs of heads of different layers, as a run found them. */
export function pairsAcross(model: Model): HeadPair[] {
  return model.page.pairs.map(({ one, other, cosine }) => ({ one, other, value: cosine, near: cosine }));
}

/** The two that are most alike of all. */
export function mostAlike(model: Model): HeadPair | undefined {
  return [...pairsOf(model, PREFERRED), ...pairsAcross(model)].sort((one, other) => other.near - one.near)[0];
}

/** The range of a relation over all layers, a head with itself left out. */
export function rangeOf(pairs: HeadPair[]): [low: number, high: number] {
  if (!pairs.length) return [0, 1];
  const values = pairs.map((pair) => pair.value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return [Math.min(0, low), high > low ? high : low + 1];
}
