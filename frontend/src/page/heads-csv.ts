/** Columns of the table of heads as CSV, named as in heads.parquet. */
import type { Head } from "../data";
import { csvOf } from "../parts/csv";
import type { Model } from "./model";

const LOCATION = ["site", "kind", "stack", "layer", "head", "original_head"];

export function headsCsv(model: Model, heads: Head[], columns: string[]): string {
  const rows = heads.map((head) => {
    const site = model.page.sites[head.site];
    const place = site ? [site.name, site.kind, site.stack, site.layer] : [null, null, null, null];
    const original = site?.originals[head.head] ?? null;
    return [...place, head.head, original, ...columns.map((column) => model.value(head, column))];
  });
  return csvOf([...LOCATION, ...columns], rows);
}
