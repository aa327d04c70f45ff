/** Readout of the hovered cell of a map, and the precision of the map. */
import type { JSX } from "preact";
import { plainToken } from "../../parts/tokens";
import { useViewLocale } from "../language";
import type { Pool } from "../types";
import type { Cursor } from "./drawing";
import type { CellValue, HeadSource } from "./source";
import type { Matrix } from "./viewport";

interface ReadoutProps {
  cell: Cursor | null;
  found: CellValue | null;
  pool: Pool;
  matrix: Matrix;
  queries: string[];
  keys: string[];
}

export function MapReadout({ cell, found, pool, matrix, queries, keys }: ReadoutProps): JSX.Element {
  const { t, number, count } = useViewLocale();
  const rangeOf = (token: number, block: number, total: number) => {
    const first = Math.floor(token / block) * block;
    return `${count(first)}–${count(Math.min(total, first + block) - 1)}`;
  };
  let text = "";
  if (cell && found && found.block === 1) {
    text = t("cellOne", {
      query: `“${plainToken(queries[cell.query] ?? "")}”`,
      key: `“${plainToken(keys[cell.key] ?? "")}”`,
      i: count(cell.query),
      j: count(cell.key),
      weight: number(found.share),
    });
  } else if (cell && found) {
    text = t(pool === "sum" ? "cellSum" : "cellMax", {
      rows: rangeOf(cell.query, found.block, matrix.queries),
      columns: rangeOf(cell.key, found.block, matrix.keys),
      share: `${found.exact ? "" : "≈ "}${number(found.share, "share")}`,
    });
  }
  return (
    <p class="readout map-readout" role="status">
      <bdi>{text}</bdi>
    </p>
  );
}

/** Precision of the map, with the progress of the exact computation. */
export function MapState({ source }: { source: HeadSource | null }): JSX.Element {
  const { t } = useViewLocale();
  if (!source) return <span class="map-state" />;
  const { progress, done, hasEstimate, pendingTiles } = source;
  const state = done ? "exact" : hasEstimate ? "estimate" : "waiting";
  const steps = { done: progress?.done ?? 0, total: progress?.total ?? "…" };
  let text = t("mapWaiting");
  if (done) text = pendingTiles ? t("mapTiles", { count: pendingTiles }) : t("mapExact");
  else if (hasEstimate) text = t("mapEstimate", steps);
  else if (progress) text = t("mapComputing", steps);
  return (
    <span class={`map-state ${state}`} data-state={state} data-tiles={pendingTiles}>
      {done ? null : <progress value={progress?.done} max={progress?.total} aria-label={text} />} {text}
    </span>
  );
}
