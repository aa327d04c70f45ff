/** The attention of one head as a map: from the whole down to single tokens. */
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { NOTHING, scaleOf } from "../../parts/colour";
import { Figure } from "../../parts/figure";
import { RampLegend } from "../../parts/legend";
import { useDark } from "../../parts/theme";
import { highest } from "../exposure";
import { useView } from "../language";
import { headName } from "../names";
import { useStore } from "../store";
import { axisOf, headKey, type HeadAt, type Pool, type Reading } from "../types";
import { MapAxis } from "./axes";
import { drawCursor, drawMap, type Colours, type Cursor } from "./drawing";
import { mapSvg } from "./map-svg";
import type { Outlook } from "./position";
import { MapReadout, MapState } from "./readout";
import { HeadSource } from "./source";
import { levelFor, spansOf, type Matrix } from "./viewport";
import { useZoom } from "./zooming";

const BEND = 0.4; // small shares are seen
const POOLS: Pool[] = ["sum", "max"];

interface Pixel {
  x: number;
  y: number;
}

function pixelOf(event: MouseEvent): Pixel {
  const plot = event.currentTarget as HTMLElement;
  const box = plot.getBoundingClientRect();
  return { x: event.clientX - box.left - plot.clientLeft, y: event.clientY - box.top - plot.clientTop };
}

interface AttentionMapProps {
  reading: Reading;
  head: HeadAt;
  outlook: Outlook;
  onPick: (cell: Cursor) => void;
}

export function AttentionMap({ reading, head, outlook, onPick }: AttentionMapProps): JSX.Element {
  const store = useStore();
  const words = useView();
  const { say } = words;
  const dark = useDark();
  const canvas = useRef<HTMLCanvasElement>(null);
  const plot = useRef<HTMLDivElement>(null);
  const { pool } = outlook;
  const [version, setVersion] = useState(0);
  const [pointer, setPointer] = useState<Pixel | null>(null);
  const [asked, setCursor] = useState<Cursor>({ query: 0, key: 0 });
  const [focused, setFocused] = useState(false);

  const place = store.state.places[head[0]];
  const queries = axisOf(reading, place?.queries ?? "text").tokens;
  const keys = axisOf(reading, place?.keys ?? "text").tokens;
  const matrix: Matrix = useMemo(() => ({ queries: queries.length, keys: keys.length }), [queries.length, keys.length]);
  const within = (token: number, count: number) => Math.min(count - 1, Math.max(0, token));
  // Another text may end sooner.
  const cursor = { query: within(asked.query, matrix.queries), key: within(asked.key, matrix.keys) };
  const { view, size, zoomBy, show, whole } = useZoom(plot, matrix, outlook.shared);

  const [source, setSource] = useState<HeadSource | null>(null);
  useEffect(() => {
    const made = new HeadSource(
      reading,
      head,
      pool,
      matrix,
      store.state.limits,
      () => setVersion((count) => count + 1),
      (error) => store.fail(error),
    );
    setSource(made);
    return () => made.stop();
  }, [reading.id, headKey(head), pool, matrix, store.returns]);

  const level = levelFor(view.scale);
  const { rows, columns } = spansOf(view, size, matrix);
  const tokenAt = ({ x, y }: Pixel): Cursor | null => {
    const key = Math.floor((x - view.x) / view.scale);
    const query = Math.floor((y - view.y) / view.scale);
    return query >= 0 && key >= 0 && query < matrix.queries && key < matrix.keys ? { query, key } : null;
  };
  const pointed = pointer && tokenAt(pointer); // found anew when the map moves under the pointer
  const cell = pointed ?? (focused ? cursor : null);
  const found = source && cell ? source.at(cell.query, cell.key, level) : null;

  const high = source ? highest(source.bright(rows, columns, level)) : 1;
  const scale = useMemo(() => scaleOf(0, high, dark, BEND), [high, dark]);
  const colours: Colours = { scale, ground: dark ? NOTHING.dark : NOTHING.light };
  const share = (value: number) => words.number(value, high < 0.02 ? "number" : "share");

  useEffect(() => source?.want(rows, columns, level), [source, rows[0], rows[1], columns[0], columns[1], level]);
  useLayoutEffect(() => {
    if (!canvas.current || !source) return;
    drawMap(canvas.current, source, view, size, colours);
    if (focused) drawCursor(canvas.current, cursor, found?.block ?? 1, view, dark ? "#ffffff" : "#000000");
  }, [source, version, view, size, scale, cursor.query, cursor.key, focused, found?.block]);

  const moveCursor = (down: number, right: number) => {
    const step = Math.max(2 ** level, Math.round(8 / view.scale));
    const next = {
      query: within(cursor.query + down * step, matrix.queries),
      key: within(cursor.key + right * step, matrix.keys),
    };
    setPointer(null);
    setCursor(next);
    show(next);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions: Record<string, () => void> = {
      "+": () => zoomBy(2, cursor),
      "=": () => zoomBy(2, cursor),
      "-": () => zoomBy(0.5, cursor),
      "−": () => zoomBy(0.5, cursor),
      "0": whole,
      Enter: () => onPick(cursor),
      ArrowUp: () => moveCursor(-1, 0),
      ArrowDown: () => moveCursor(1, 0),
      ArrowLeft: () => moveCursor(0, -1),
      ArrowRight: () => moveCursor(0, 1),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };
  const name = headName(store.state, head, words);
  const axes = { across: say("mapAcross"), down: say("mapDown") };
  return (
    <Figure
      class="map"
      title={say("map")}
      name={`map-${head.join("-")}-${reading.slot}`}
      fileTitle={`${say("mapOf", { head: name, slot: reading.slot })}: ${store.state.model.name}`}
      draw={
        source && (() => mapSvg({ source, view, size, colours, queries, keys, ...axes, count: words.count, share }))
      }
    >
      <div class="map-controls">
        <span class="segments" role="group" aria-label={say("pool")}>
          {POOLS.map((value) => (
            <button type="button" aria-pressed={pool === value} onClick={() => outlook.choosePool(value)}>
              {say(`pool_${value}`)}
            </button>
          ))}
        </span>
        <span class="map-zoom">
          <button type="button" aria-label={say("zoomIn")} onClick={() => zoomBy(2, null)}>
            +
          </button>
          <button type="button" aria-label={say("zoomOut")} onClick={() => zoomBy(0.5, null)}>
            −
          </button>
          <button type="button" onClick={whole}>
            {say("zoomWhole")}
          </button>
        </span>
        <MapState source={source} />
      </div>
      <div class="map-frame">
        <MapAxis
          side="columns"
          tokens={keys}
          span={columns}
          offset={view.x}
          scale={view.scale}
          chosen={cell?.key ?? null}
        />
        <MapAxis
          side="rows"
          tokens={queries}
          span={rows}
          offset={view.y}
          scale={view.scale}
          chosen={cell?.query ?? null}
        />
        <div
          class="map-plot"
          ref={plot}
          role="application"
          tabIndex={0}
          aria-label={say("mapLabel", { head: name })}
          data-level={level}
          data-scale={view.scale.toFixed(4)}
          onKeyDown={onKeyDown}
          onFocus={(event) => setFocused(event.currentTarget.matches(":focus-visible"))}
          onBlur={() => setFocused(false)}
          onPointerMove={(event) => setPointer(pixelOf(event))}
          onPointerLeave={() => setPointer(null)}
          onClick={(event) => {
            const token = tokenAt(pixelOf(event));
            if (!token) return;
            setCursor(token);
            onPick(token);
          }}
        >
          <canvas ref={canvas} aria-hidden="true" />
        </div>
      </div>
      <MapReadout cell={cell} found={found} pool={pool} matrix={matrix} queries={queries} keys={keys} />
      <div class="map-foot">
        <RampLegend scale={scale} format={share} />
        <p class="note">{say("mapHelp")}</p>
      </div>
    </Figure>
  );
}
