/** A chart of a plan, as report/plan_payload.py describes it: stacked bars, or lines on a logarithmic axis. */
import { axisX, axisY, barY, dot, gridY, line, ruleY, text, type Markish, type PlotOptions } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { ChartFigure, widthOf, type Build } from "../parts/chart";
import { FORMATS, multiplesUpTo, powersAround } from "./quantities";

interface Series {
  name: string;
  values: (number | null)[];
  colour: number;
  dashed: boolean;
}

export interface PlanChart {
  kind: "bars" | "lines";
  title: string;
  axis: string;
  unit: keyof typeof FORMATS;
  along: string;
  places: string[];
  series: Series[];
}

const [LEFT, ROW, SWATCH] = [82, 18, 16];
const CHANNELS = { x: "place", y: "value" };
const inkOf = (one: Series) => `var(--p${one.colour})`;

export function PlanFigure({ chart }: { chart: PlanChart }): JSX.Element {
  const build = useMemo<Build>(() => (width) => optionsOf(chart, width), [chart]);
  const name = chart.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const label = `${chart.title}: ${chart.series.map((one) => one.name).join("; ")}`;
  return <ChartFigure title={chart.title} name={name} label={label} build={build} />;
}

function optionsOf(chart: PlanChart, width: number): PlotOptions {
  const { places, series } = chart;
  const legend = legendOf(series, width);
  // As many names of places as fit beside each other.
  const every = Math.ceil(((Math.max(...places.map(widthOf)) + 6) * places.length) / (width - LEFT));
  const axis = { labelAnchor: "center", labelArrow: "none", tickSize: 0, fontSize: 12 } as const;
  const { x, y, ticks, marks } = chart.kind === "bars" ? barsOf(chart) : linesOf(chart);
  return {
    width,
    height: 280 + legend.height,
    marginTop: legend.height + 12,
    marginLeft: LEFT,
    marginRight: 12,
    marginBottom: 42,
    x,
    y,
    marks: [
      gridY({ ticks, stroke: "var(--line)", strokeOpacity: 1 }),
      ...marks,
      axisX({ ...axis, label: chart.along, ticks: places.filter((_, i) => i % every === 0) }),
      axisY({ ...axis, label: chart.axis, ticks, tickFormat: FORMATS[chart.unit] }),
      ...legend.marks,
    ],
  };
}

interface Drawn extends Pick<PlotOptions, "x" | "y"> {
  ticks: number | number[];
  marks: Markish[];
}

function barsOf(chart: PlanChart): Drawn {
  const { places, series } = chart;
  const totals = places.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] ?? 0), 0));
  const ticks = chart.unit === "bytes" ? multiplesUpTo(Math.max(...totals)) : 5;
  const rows = series.flatMap((one) => rowsOf(chart, one));
  return {
    x: { type: "band", domain: places, padding: 0.28 },
    y: typeof ticks === "number" ? { nice: ticks } : { domain: [0, ticks.at(-1)] },
    ticks,
    marks: [barY(rows, { ...CHANNELS, title: "title", fill: "ink" }), ruleY([0], { stroke: "var(--muted)" })],
  };
}

function linesOf(chart: PlanChart): Drawn {
  const all = chart.series.map((one) => ({ ...one, rows: rowsOf(chart, one), ink: inkOf(one) }));
  const ticks = powersAround(all.flatMap((one) => one.rows.map((row) => row.value)));
  return {
    x: { type: "point", domain: chart.places, padding: 0.4 },
    y: { type: "log", base: 2, domain: [ticks[0], ticks.at(-1)] },
    ticks,
    marks: all.flatMap(({ rows, ink, dashed }) => [
      line(rows, { ...CHANNELS, stroke: ink, strokeWidth: 2.2, strokeDasharray: dashed ? "6,4" : undefined }),
      dot(rows, { ...CHANNELS, title: "title", fill: ink, r: 3.4 }),
    ]),
  };
}

/** The places where a series has a value, with what is said of it. */
function rowsOf({ places, along, unit }: PlanChart, one: Series) {
  return places.flatMap((place, i) => {
    const value = one.values[i];
    if (!value) return [];
    return { place, value, ink: inkOf(one), title: `${place} ${along}: ${one.name} ${FORMATS[unit](value)}` };
  });
}

/** The names of the series above the frame; part of the drawing, so that a saved file has them. */
function legendOf(series: Series[], width: number): { height: number; marks: Markish[] } {
  let [next, row] = [0, 0];
  const placed = series.map((one) => {
    const wide = SWATCH + widthOf(one.name);
    if (next > 0 && next + wide > width) [next, row] = [0, row + 1];
    const at = { x: next - LEFT, y: row * ROW };
    next += wide + SWATCH;
    return { one, ...at };
  });
  const height = (row + 1) * ROW;
  const marks = placed.flatMap(({ one, x, y }) => {
    const at = { frameAnchor: "top-left", dy: y - height } as const;
    return [
      dot([one], { ...at, dx: x + 5, symbol: "square", r: 5, fill: inkOf(one) }),
      text([one.name], { ...at, dx: x + SWATCH, textAnchor: "start", lineAnchor: "middle", fontSize: 12 }),
    ];
  });
  return { height, marks };
}
