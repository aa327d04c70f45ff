/** Where one head looks: as a map of places, and by distance. */
import { axisX, axisY, barY, ruleX, ruleY } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { part, unpack, type Place } from "../data";
import { ChartFigure, type Build } from "../parts/chart";
import { Figure } from "../parts/figure";
import { HeatMap, heatSvg, type Heat } from "../parts/heat-map";
import { useWords, type Words } from "../parts/language";
import { RampLegend } from "../parts/legend";
import { useDark } from "../parts/theme";
import { useModel } from "./model";
import { mapOf } from "./stack-grid";

/** What the map shows, in words: how much lies on the diagonal, on the first keys, and where it is strongest. */
function described(heat: Heat, words: Words): string {
  let [all, diagonal, first, best] = [0, 0, 0, 0];
  for (let i = 0; i < heat.rows * heat.columns; i++) {
    const value = heat.values[i] ?? 0;
    const [row, column] = [Math.floor(i / heat.columns), i % heat.columns];
    all += value;
    if (row === column) diagonal += value;
    if (column === 0) first += value;
    if (value > (heat.values[best] ?? 0)) best = i;
  }
  return words.say("mapDescribed", {
    rows: heat.rows,
    columns: heat.columns,
    diagonal: words.number(diagonal / (all || 1), "share"),
    first: words.number(first / (all || 1), "share"),
    row: Math.floor(best / heat.columns) + 1,
    column: (best % heat.columns) + 1,
  });
}

export function BlockMapFigure({ place }: { place: Place }): JSX.Element | null {
  const model = useModel();
  const words = useWords();
  const { say, number } = words;
  const dark = useDark();
  const [pointed, setPointed] = useState<[number, number] | null>(null);
  const map = useMemo(() => mapOf(model, place, dark), [model, place[0], place[1], dark]);
  if (!map) return null;
  const { heat, scale } = map;
  const block = model.page.map_block;
  const span = (index: number) =>
    block ? say("tokensFromTo", { from: index * block, to: (index + 1) * block - 1 }) : String(index + 1);
  const value = pointed ? heat.values[pointed[0] * heat.columns + pointed[1]] : null;
  const axes = { across: say("mapAcross"), down: say("mapDown") };
  return (
    <Figure
      class="map-figure"
      title={say("blockMap")}
      note={say("blockMapAbout")}
      name={`head-${place.join("-")}-map`}
      fileTitle={`${model.long(place, words)}: ${say("blockMap")}`}
      draw={() => heatSvg(heat, scale, axes)}
    >
      <div class="map">
        <span class="across">{axes.across} →</span>
        <span class="down">← {axes.down}</span>
        <HeatMap {...heat} scale={scale} label={described(heat, words)} onPoint={setPointed} />
      </div>
      <p class="readout" aria-hidden="true">
        {pointed
          ? say("mapCell", { query: span(pointed[0]), key: span(pointed[1]), share: number(value, "share") })
          : say("mapHint")}
      </p>
      <RampLegend scale={scale} format={(x) => number(x, "share")} />
    </Figure>
  );
}

interface Bar {
  label: string;
  from: number;
  to: number;
  share: number;
}

const SINGLE = 4;

/** Offsets up to four singly, further ones in spans that double, so that near and far are both seen. */
function barsOf(edges: number[], shares: ArrayLike<number>): Bar[] {
  const bars = new Map<string, Bar>();
  for (let i = 0; i + 1 < edges.length; i++) {
    const [first, last] = [edges[i] as number, (edges[i + 1] as number) - 1];
    const near = Math.min(Math.abs(first), Math.abs(last));
    const sign = first < 0 ? -1 : 1;
    const key = near <= SINGLE ? String(first) : `${sign} ${Math.floor(Math.log2(near - 1))}`;
    const label = near <= SINGLE ? signed(first) : "";
    const bar = bars.get(key);
    if (bar) {
      bar.share += shares[i] ?? 0;
      bar.from = Math.min(bar.from, first);
      bar.to = Math.max(bar.to, last);
    } else bars.set(key, { label, from: first, to: last, share: shares[i] ?? 0 });
  }
  return [...bars.values()].map((bar) => ({ ...bar, label: bar.label || spanned(bar.from, bar.to) }));
}

function signed(offset: number): string {
  return offset < 0 ? `−${-offset}` : offset > 0 ? `+${offset}` : "0";
}

function spanned(from: number, to: number): string {
  if (from === to) return signed(from);
  return from < 0 ? `−${-from}…−${-to}` : `+${from}…+${to}`;
}

export function OffsetFigure({ place }: { place: Place }): JSX.Element | null {
  const model = useModel();
  const words = useWords();
  const { say, number } = words;
  const packed = model.page.offsets.sites[String(place[0])];
  const bars = useMemo(
    () => (packed ? barsOf(model.page.offsets.edges, part(unpack(packed), place[1]).values) : []),
    [packed, place[1]],
  );
  const build = useMemo<Build>(
    () => (width) => ({
      width,
      height: 290,
      marginBottom: 84,
      marginLeft: 44,
      x: { type: "band", domain: bars.map((bar) => bar.label), padding: 0.12 },
      y: { grid: true, domain: [0, Math.max(0.01, ...bars.map((bar) => bar.share))] },
      marks: [
        barY(bars, { x: "label", y: "share", fill: (bar: Bar) => (bar.from === 0 ? "var(--second)" : "var(--first)") }),
        ruleX(
          bars.filter((bar) => bar.from === 0),
          { x: "label", stroke: "var(--muted)", strokeDasharray: "2,3" },
        ),
        ruleY([0], { stroke: "var(--muted)" }),
        axisX({
          label: say("offsetAxis"),
          labelAnchor: "center",
          labelArrow: "none",
          tickRotate: width < 420 ? -90 : -60,
          tickSize: 3,
        }),
        axisY({
          label: say("shareOfAttention"),
          tickFormat: (x: number) => number(x, "share"),
          ticks: 5,
          labelArrow: "none",
        }),
      ],
    }),
    [bars, words],
  );
  if (!bars.length) return null;
  const most = [...bars]
    .sort((one, other) => other.share - one.share)
    .slice(0, 3)
    .filter((bar) => bar.share > 0);
  const label = say("offsetDescribed", {
    most: words.list(most.map((bar) => `${bar.label}: ${number(bar.share, "share")}`)),
  });
  return (
    <ChartFigure
      class="offset-figure"
      title={say("offsetProfile")}
      note={say("offsetAbout")}
      name={`head-${place.join("-")}-offsets`}
      fileTitle={`${model.long(place, words)}: ${say("offsetProfile")}`}
      label={label}
      build={build}
    />
  );
}
