/** One token in every head: whom it attends to, and who attends to it; asked for once and remembered for a while. */
import { useEffect, useState } from "preact/hooks";
import { part, unpack } from "../data";
import { follow } from "./api";
import { useStore } from "./store";
import type { AxisName, HeadAt, Reading, WeightRow, WordLine } from "./types";

const KEPT = 64 << 20; // bytes of what is remembered
const FEW = 128; // cells of a row that is too long to be told token by token
const HESITATION = 60; // milliseconds, so that a pointer on its way asks nothing

export type Side = "attends" | "attended";
export type WordRows = Map<number, WordLine>;

const known = new Map<string, WordRows>();

/** Four letters of base 64 hold three bytes of numbers, and both are kept. */
function bytesOf(rows: WordRows): number {
  const letters = [...rows.values()].flatMap((line) => [line.attends, line.attended]);
  return letters.reduce((sum, row) => sum + 1.75 * (row?.weights.data.length ?? 0), 0);
}

function remember(key: string, rows: WordRows): void {
  known.set(key, rows);
  let bytes = [...known.values()].reduce((sum, each) => sum + bytesOf(each), 0);
  for (const [oldest, each] of known) {
    if (bytes <= KEPT || oldest === key) break;
    known.delete(oldest);
    bytes -= bytesOf(each);
  }
}

export interface ChosenToken {
  axis: AxisName;
  index: number;
}

/** The rows of a token, of each place as it arrives; null while none is chosen. */
export function useWord(reading: Reading | null, chosen: ChosenToken | null): WordRows | null {
  const store = useStore();
  const [rows, setRows] = useState<{ key: string; rows: WordRows } | null>(null);
  const key = reading && chosen ? `${reading.id}/${chosen.axis}/${chosen.index}` : "";
  useEffect(() => {
    if (!reading || !chosen || known.has(key)) return;
    const controller = new AbortController();
    const ask = async () => {
      const found: WordRows = new Map();
      try {
        const longest = Math.max(reading.text.tokens.length, reading.target?.tokens.length ?? 0);
        const most = store.state.limits.word_cells;
        const cells = longest <= most ? most : FEW;
        const body = { reading: reading.id, token: chosen.index, axis: chosen.axis, cells };
        await follow(
          "word",
          body,
          (line) => {
            if (typeof line.place === "number") found.set(line.place, line as unknown as WordLine);
          },
          controller.signal,
        );
        remember(key, found);
        setRows({ key, rows: found });
      } catch (error) {
        store.fail(error);
      }
    };
    const timer = setTimeout(ask, HESITATION);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [key, store.returns]);
  if (!key) return null;
  return known.get(key) ?? (rows?.key === key ? rows.rows : null);
}

export interface HeadRow {
  /** One weight a token, or the largest of `block` tokens. */
  cells: Float32Array;
  block: number;
  top: { token: number; weight: number }[];
}

export function rowOf(rows: WordRows | null, [place, head]: HeadAt, side: Side): HeadRow | null {
  const row: WeightRow | null | undefined = rows?.get(place)?.[side];
  if (!row) return null;
  const tokens = row.top.tokens[head] ?? [];
  const weights = row.top.weights[head] ?? [];
  return {
    cells: part(unpack(row.weights), head).values,
    block: row.block,
    top: tokens.map((token, i) => ({ token, weight: weights[i] ?? 0 })),
  };
}
