/** Names and keys of heads. */
import type { HeadId } from "../data";

/** Identifies a head in maps, links and requests; never shown. */
export const headKey = ([layer, head]: HeadId): string => `${layer}.${head}`;

export function headOf(key: string): HeadId {
  const [layer = -1, head = -1] = key.split(".").map(Number);
  return [layer, head];
}

/** The name of a head, as the command line writes and reads it: `L5H3` is head 3 of layer 5. */
export function headName(layer: number | string, head: number): string {
  return `L${layer}H${head}`;
}
