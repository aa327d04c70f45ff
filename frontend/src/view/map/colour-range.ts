/** Range of the colour scale of a map, so that diffuse attention is visible too. */

const DIFFUSE = 0.1; // below this the scale adapts to the values

/** The upper end of the scale: 1 for focused attention, else a power of two, which seldom changes while moving. */
export function colourRange(bright: number): number {
  return bright >= DIFFUSE ? 1 : 2 ** Math.ceil(Math.log2(Math.max(bright, 2 ** -24)));
}
