/** Upper end of the colour scale of attention weights, lowered for diffuse attention to make it visible. */

const DIFFUSE = 0.1; // attention is diffuse if its high weights are below this

/**
 * The upper end of the scale for weights up to about `highest`: 1, or for diffuse attention the next power of two, which
 * seldom changes while a map is panned.
 */
export function colourRange(highest: number): number {
  return highest >= DIFFUSE ? 1 : 2 ** Math.ceil(Math.log2(Math.max(highest, 2 ** -24)));
}
