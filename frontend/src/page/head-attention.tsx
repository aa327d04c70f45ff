/** Attention of one head by position and by distance. */
import { axisX, axisY, barY, ruleX, ruleY } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { hasNaN, part, unpack, type HeadId } from "../data";
import { ChartFigure, widthOf, type Build } from "../parts/chart";
import { Figure } from "../parts/figure";
import { HeatMap, heatSvg, type Heat } from "../parts/heat-map";
import { useLocale, type Locale } from "../parts/language";
import { RampLegend } from "../parts/legend";
import { useDark } from "../parts/theme";
import { useModel } from "./model";
import { mapOf } from "./stack-grid";

/** Description of a map: its mass on the diagonal and on the first keys, and its maximum. */
function described(heat: Heat, locale: Locale): string {
  if (hasNaN(heat.values)) return locale.t("notANumber");
  let [all, diagonal, first, best] = [0, 0, 0, 0];
  for (let i = 0; i < heat.rows * heat.columns; i++) {
    const value = heat.values[i] ?? 0;
    const [row, column] = [Math.floor(i / heat.columns), i % heat.columns];
    all += value;
    if (row === column) diagonal += value;
    if (column === 0) first += value;
    if (value > (heat.values[best] ?? 0)) best = i;
  }
  return locale.t("mapDescribed", {
    rows: heat.rows,
    columns: heat.columns,
    diagonal: locale.number(diagonal / (all || 1), "share"),
    first: locale.number(first / (all || 1), "share"),
    row: Math.floor(best / heat.columns) + 1,
    column: (best % heat.columns) + 1,
  });
}

export function BlockMapFigure({ id }: { id: HeadId }): JSX.Element | null {
  const model = useModel();
  const locale = useLocale();
  const { t, number } = locale;
  const dark = useDark();
  const [hovered, setHovered] = useState<[number, number] | null>(null);
  const map = useMemo(() => mapOf(model, id, dark), [model, ...id, dark]);
  if (!map) return null;
  const { heat, scale } = map;
  const block = model.page.map_block;
  const span = (index: number) =>
    block ? t("tokensFromTo", { from: index * block, to: (index + 1) * block - 1 }) : String(index + 1);
  const value = hovered ? heat.values[hovered[0] * heat.columns + hovered[1]] : null;
  const axes = { across: t("mapAcross"), down: t("mapDown") };
  const format = (x: number) => number(x, "share");
  const ramp = { scale, format, ...(hasNaN(heat.values) ? { missing: t("notANumber") } : {}) };
  return (
    <Figure
      class="map-figure"
      title={t("blockMap")}
      note={t("blockMapAbout")}
      name={`head-${id.join("-")}-map`}
      fileTitle={`${model.fullName(id, locale)}: ${t("blockMap")}`}
      draw={() => heatSvg(heat, ramp, axes)}
    >
      <div class="map">
        <span class="across">{axes.across} →</span>
        <span class="down">← {axes.down}</span>
        <HeatMap {...heat} scale={scale} label={described(heat, locale)} onHover={setHovered} />
      </div>
      <p class="readout" aria-hidden="true">
        {hovered
          ? t("mapCell", { query: span(hovered[0]), key: span(hovered[1]), share: number(value, "share") })
          : t("mapHint")}
      </p>
      <RampLegend {...ramp} />
    </Figure>
  );
}

interface Bar {
  label: string;
  from: number;
  to: number;
  share: number;
  /** Mean share of one offset: bins of different widths are compared by it. */
  density: number;
}

const axis = { labelArrow: "none" } as const;
const SINGLE = 4; // offsets with a bar of their own

/** One bar per offset up to 4, then bins of doubling width. */
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
    } else bars.set(key, { label, from: first, to: last, share: shares[i] ?? 0, density: 0 });
  }
  return [...bars.values()].map((bar) => ({
    ...bar,
    label: bar.label || spanned(bar.from, bar.to),
    density: bar.share / (bar.to - bar.from + 1),
  }));
}

function signed(offset: number): string {
  return offset < 0 ? `−${-offset}` : offset > 0 ? `+${offset}` : "0";
}

function spanned(from: number, to: number): string {
  if (from === to) return signed(from);
  return from < 0 ? `−${-from}…−${-to}` : `+${from}…+${to}`;
}

export function OffsetFigure({ id }: { id: HeadId }): JSX.Element | null {
  const model = useModel();
  const locale = useLocale();
  const { t, number } = locale;
  const packed = model.page.offsets.sites[String(id[0])];
  const bars = useMemo(
    () => (packed ? barsOf(model.page.offsets.edges, part(unpack(packed), id[1]).values) : []),
    [packed, id[1]],
  );
  const build = useMemo<Build>(
    () => (width) => {
      const isNarrow = width < 420;
      const longest = Math.max(0, ...bars.map((bar) => widthOf(bar.label)));
      const marginBottom = 48 + longest * (isNarrow ? 1 : 0.87); // sine of 90 or 60 degrees
      return {
        width,
        height: 206 + marginBottom,
        marginBottom,
        marginLeft: 44,
        x: { type: "band", domain: bars.map((bar) => bar.label), padding: 0.12 },
        y: { grid: true, domain: [0, Math.max(0.001, ...bars.map((bar) => bar.density || 0))] },
        marks: [
          barY(bars, {
            x: "label",
            y: "density",
            fill: (bar: Bar) => (bar.from === 0 ? "var(--second)" : "var(--first)"),
            title: (bar: Bar) => t("offsetBar", { offsets: bar.label, share: number(bar.share, "share") }),
          }),
          ruleX(
            bars.filter((bar) => bar.from === 0),
            { x: "label", stroke: "var(--muted)", strokeDasharray: "2,3" },
          ),
          ruleY([0], { stroke: "var(--muted)" }),
          axisX({
            ...axis,
            label: t("offsetAxis"),
            labelAnchor: "center",
            tickRotate: isNarrow ? -90 : -60,
            tickSize: 3,
          }),
          axisY({ ...axis, label: t("sharePerOffset"), tickFormat: (x: number) => number(x, "share"), ticks: 5 }),
        ],
      };
    },
    [bars, locale],
  );
  if (!bars.length) return null;
  const isMissing = bars.some((bar) => Number.isNaN(bar.share));
  const largest = [...bars].sort((one, other) => other.share - one.share).slice(0, 3);
  const most = largest.filter((bar) => bar.share > 0);
  const label = isMissing
    ? t("notANumber")
    : t("offsetDescribed", {
        most: locale.list(most.map((bar) => `${bar.label}: ${number(bar.share, "share")}`)),
      });
  return (
    <ChartFigure
      class="offset-figure"
      title={t("offsetProfile")}
      note={isMissing ? t("notANumber") : t("offsetAbout")}
      name={`head-${id.join("-")}-offsets`}
      fileTitle={`${model.fullName(id, locale)}: ${t("offsetProfile")}`}
      label={label}
      build={build}
    />
  );
}
