/** How far a scale of shares reaches, so that a head that looks everywhere a little is seen too. */

const DIFFUSE = 0.1; // below this, colours are spread over what there is

/** The end of the scale: 1 for what is sharp, else a power of two, so that moving about seldom changes it. */
export function highest(bright: number): number {
  return bright >= DIFFUSE ? 1 : 2 ** Math.ceil(Math.log2(Math.max(bright, 2 ** -24)));
}
