/** Zoomable attention matrix of one head. */
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { HeadId } from "../../data";
import { noValue, scaleOf } from "../../parts/colour";
import { Segments } from "../../parts/controls";
import { Figure } from "../../parts/figure";
import { RampLegend } from "../../parts/legend";
import { useDark } from "../../parts/theme";
import { useViewLocale } from "../language";
import { headName } from "../names";
import { useStore } from "../store";
import { axisOf, headKey, type Pool, type Trace } from "../types";
import { MapAxis } from "./axes";
import { colourRange } from "./colour-range";
import { drawCursor, drawMap, type Colours, type Cursor } from "./drawing";
import { mapSvg } from "./map-svg";
import type { MapView } from "./position";
import { MapReadout, MapState } from "./readout";
import { HeadSource } from "./source";
import { levelFor, spansOf, type Matrix } from "./viewport";
import { useZoom } from "./zooming";

const GAMMA = 0.4; // expands small weights
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
  trace: Trace;
  head: HeadId;
  mapView: MapView;
  onPick: (cell: Cursor) => void;
}

export function AttentionMap({ trace, head, mapView, onPick }: AttentionMapProps): JSX.Element {
  const store = useStore();
  const locale = useViewLocale();
  const { t } = locale;
  const dark = useDark();
  const canvas = useRef<HTMLCanvasElement>(null);
  const plot = useRef<HTMLDivElement>(null);
  const { pool } = mapView;
  const [version, setVersion] = useState(0);
  const [pointer, setPointer] = useState<Pixel | null>(null);
  const [requested, setCursor] = useState<Cursor>({ query: 0, key: 0 });
  const [focused, setFocused] = useState(false);

  const layer = store.state.layers[head[0]];
  const queries = axisOf(trace, layer?.queries ?? "text").tokens;
  const keys = axisOf(trace, layer?.keys ?? "text").tokens;
  const matrix: Matrix = useMemo(() => ({ queries: queries.length, keys: keys.length }), [queries.length, keys.length]);
  const within = (token: number, count: number) => Math.min(count - 1, Math.max(0, token));
  // Another text may be shorter.
  const cursor = { query: within(requested.query, matrix.queries), key: within(requested.key, matrix.keys) };
  const { view, size, zoomBy, show, whole } = useZoom(plot, matrix, mapView.shared);

  const [source, setSource] = useState<HeadSource | null>(null);
  useEffect(() => {
    const onChange = () => setVersion((count) => count + 1);
    const created = new HeadSource({
      trace,
      head,
      pool,
      matrix,
      limits: store.state.limits,
      onChange,
      onError: store.fail,
    });
    setSource(created);
    return () => created.stop();
  }, [trace.id, headKey(head), pool, matrix, store.reconnects]);

  const level = levelFor(view.scale);
  const { rows, columns } = spansOf(view, size, matrix);
  const tokenAt = ({ x, y }: Pixel): Cursor | null => {
    const key = Math.floor((x - view.x) / view.scale);
    const query = Math.floor((y - view.y) / view.scale);
    return query >= 0 && key >= 0 && query < matrix.queries && key < matrix.keys ? { query, key } : null;
  };
  const hovered = pointer && tokenAt(pointer); // updated when the map moves under the pointer
  const cell = hovered ?? (focused ? cursor : null);
  const found = source && cell ? source.at(cell.query, cell.key, level) : null;

  const high = source ? colourRange(source.bright(rows, columns, level)) : 1;
  const scale = useMemo(() => scaleOf(0, high, dark, GAMMA), [high, dark]);
  const colours: Colours = { scale, background: noValue(dark) };
  const share = (value: number) => locale.number(value, high < 0.02 ? "number" : "share");

  useEffect(() => source?.request(rows, columns, level), [source, rows[0], rows[1], columns[0], columns[1], level]);
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
    const [zoomIn, zoomOut] = [2, 0.5].map((factor) => () => zoomBy(factor, cursor)) as [() => void, () => void];
    const actions: Record<string, () => void> = {
      "+": zoomIn,
      "=": zoomIn,
      "-": zoomOut,
      "−": zoomOut,
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
  const name = headName(store.state, head, locale);
  const axes = { across: t("mapAcross"), down: t("mapDown") };
  return (
    <Figure
      class="map"
      title={t("map")}
      name={`map-${head.join("-")}-${trace.slot}`}
      fileTitle={`${t("mapOf", { head: name, slot: trace.slot })}: ${store.state.model.name}`}
      draw={
        source && (() => mapSvg({ source, view, size, colours, queries, keys, ...axes, count: locale.count, share }))
      }
    >
      <div class="map-controls">
        <Segments<Pool>
          label={t("pool")}
          options={POOLS.map((value) => [value, t(`pool_${value}`)])}
          value={pool}
          onChange={mapView.choosePool}
        />
        <span class="map-zoom">
          <button type="button" aria-label={t("zoomIn")} onClick={() => zoomBy(2, null)}>
            +
          </button>
          <button type="button" aria-label={t("zoomOut")} onClick={() => zoomBy(0.5, null)}>
            −
          </button>
          <button type="button" onClick={whole}>
            {t("zoomWhole")}
          </button>
        </span>
        <MapState source={source} />
      </div>
      <div class="map-frame">
        <span class="map-corner" aria-hidden="true">
          {axes.across} →<br />
          {axes.down} ↓
        </span>
        <MapAxis side="columns" tokens={keys} span={columns} offset={view.x} scale={view.scale} chosen={cell?.key} />
        <MapAxis side="rows" tokens={queries} span={rows} offset={view.y} scale={view.scale} chosen={cell?.query} />
        <div
          class="map-plot"
          ref={plot}
          role="application"
          tabIndex={0}
          aria-label={t("mapLabel", { head: name })}
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
        <RampLegend scale={scale} format={share} {...(source?.hasNaN ? { missing: t("notANumber") } : {})} />
        <p class="note">{t("mapHelp")}</p>
      </div>
    </Figure>
  );
}
