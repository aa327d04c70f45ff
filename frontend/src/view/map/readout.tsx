/** What a map says in words: the cell that is pointed at, and how exact the picture is by now. */
import type { JSX } from "preact";
import { plainToken } from "../../parts/tokens";
import { useView } from "../language";
import type { Pool } from "../types";
import type { Cursor } from "./drawing";
import type { Found, HeadSource } from "./source";
import type { Matrix } from "./viewport";

interface ReadoutProps {
  cell: Cursor | null;
  found: Found | null;
  pool: Pool;
  matrix: Matrix;
  queries: string[];
  keys: string[];
}

export function MapReadout({ cell, found, pool, matrix, queries, keys }: ReadoutProps): JSX.Element {
  const { say, number, count } = useView();
  const between = (token: number, block: number, total: number) => {
    const first = Math.floor(token / block) * block;
    return `${count(first)}–${count(Math.min(total, first + block) - 1)}`;
  };
  let text = "";
  if (cell && found && found.block === 1) {
    text = say("cellOne", {
      query: `“${plainToken(queries[cell.query] ?? "")}”`,
      key: `“${plainToken(keys[cell.key] ?? "")}”`,
      i: count(cell.query),
      j: count(cell.key),
      weight: number(found.share),
    });
  } else if (cell && found) {
    text = say(pool === "sum" ? "cellSum" : "cellMax", {
      rows: between(cell.query, found.block, matrix.queries),
      columns: between(cell.key, found.block, matrix.keys),
      share: `${found.exact ? "" : "≈ "}${number(found.share, "share")}`,
    });
  }
  return (
    <p class="readout map-readout" role="status">
      <bdi>{text}</bdi>
    </p>
  );
}

/** Whether what is seen is an estimate, how far the exact numbers are, or that they are there. */
export function MapState({ source }: { source: HeadSource | null }): JSX.Element {
  const { say } = useView();
  if (!source) return <span class="map-state" />;
  const { progress, done, hasEstimate, tilesOnTheirWay } = source;
  const how = done ? "exact" : hasEstimate ? "estimate" : "waiting";
  const steps = { done: progress?.done ?? 0, total: progress?.total ?? "…" };
  const text = done
    ? tilesOnTheirWay
      ? say("mapTiles", { count: tilesOnTheirWay })
      : say("mapExact")
    : hasEstimate
      ? say("mapEstimate", steps)
      : progress
        ? say("mapComputing", steps)
        : say("mapWaiting");
  return (
    <span class={`map-state ${how}`} data-how={how} data-tiles={tilesOnTheirWay}>
      {done ? null : <progress value={progress?.done} max={progress?.total} aria-label={text} />} {text}
    </span>
  );
}
