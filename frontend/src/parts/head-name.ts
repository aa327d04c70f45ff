/** The name of a head, as the command line writes and reads it: `L5H3` is head 3 of layer 5. */
export function headName(layer: number | string, head: number): string {
  return `L${layer}H${head}`;
}
