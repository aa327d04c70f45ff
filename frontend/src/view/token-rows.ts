/** Attention from and to one token in every head, fetched once and cached. */
import { useEffect, useState } from "preact/hooks";
import { part, unpack, type HeadId } from "../data";
import type { TopToken } from "../parts/attention-words";
import { request } from "./api";
import { useStore } from "./store";
import type { TokenId, TokenRow, Trace, WeightRow } from "./types";

const CACHE_BYTES = 64 << 20;
const COARSE_CELLS = 128; // of a row that is too long for one cell per token
const HOVER_DELAY = 60; // milliseconds, so that a moving pointer sends no requests

export type Side = "attends" | "attended";
/** The rows of one token, by layer. */
export type TokenRows = Map<number, Pick<TokenRow, "attends"> & Partial<TokenRow>>;

const cache = new Map<string, TokenRows>();

/** Size of the base64 text (4 letters for 3 bytes) and of the unpacked numbers. */
function bytesOf(rows: TokenRows): number {
  const sides = [...rows.values()].flatMap((row) => [row.attends, row.attended]);
  return sides.reduce((sum, side) => sum + 1.75 * (side?.weights.data.length ?? 0), 0);
}

function addToCache(key: string, rows: TokenRows): void {
  cache.set(key, rows);
  let bytes = [...cache.values()].reduce((sum, each) => sum + bytesOf(each), 0);
  for (const [oldest, each] of cache) {
    if (bytes <= CACHE_BYTES || oldest === key) break;
    cache.delete(oldest);
    bytes -= bytesOf(each);
  }
}

/** The rows of a token; null until they arrive, and without a token. */
export function useTokenRows(trace: Trace | null, token: TokenId | null): TokenRows | null {
  const store = useStore();
  const [arrived, setArrived] = useState<{ key: string; rows: TokenRows } | null>(null);
  const key = trace && token ? `${trace.id}/${token.axis}/${token.index}` : "";
  useEffect(() => {
    if (!trace || !token || cache.has(key)) return;
    const controller = new AbortController();
    const fetchRows = async () => {
      const rows: TokenRows = new Map();
      const longest = Math.max(trace.text.tokens.length, trace.target?.tokens.length ?? 0);
      const most = store.state.limits.word_cells;
      const cells = longest <= most ? most : COARSE_CELLS;
      const body = { trace: trace.id, token: token.index, axis: token.axis, cells };
      await request("word", body, controller.signal, (message) => {
        if (typeof message.layer === "number") rows.set(message.layer, message as unknown as TokenRow);
      });
      addToCache(key, rows);
      setArrived({ key, rows });
    };
    const timer = setTimeout(() => fetchRows().catch(store.fail), HOVER_DELAY);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [key, store.reconnects]);
  return cache.get(key) ?? (arrived?.key === key ? arrived.rows : null);
}

export interface HeadRow {
  /** One weight per token, or the maximum of `block` tokens. */
  cells: Float32Array;
  block: number;
  top: TopToken[];
}

export function rowOf(rows: TokenRows | null, [layer, head]: HeadId, side: Side): HeadRow | null {
  const row: WeightRow | null | undefined = rows?.get(layer)?.[side];
  if (!row) return null;
  const weights = row.top.weights[head] ?? [];
  const top = (row.top.tokens[head] ?? []).map((token, i) => ({ token, weight: weights[i] ?? NaN }));
  return { cells: part(unpack(row.weights), head).values, block: row.block, top };
}
