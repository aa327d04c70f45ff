/** A chart of a plan (report/plan_payload.py): stacked bars, or lines on a logarithmic axis. */
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
  unit: keyof typeof FORMATS;
  x_label: string;
  y_label: string;
  x_values: string[];
  series: Series[];
}

const [LEFT, ROW, SWATCH] = [82, 18, 16];
const CHANNELS = { x: "x", y: "value" };
const colourOf = (one: Series) => `var(--p${one.colour})`;

export function PlanFigure({ chart }: { chart: PlanChart }): JSX.Element {
  const build = useMemo<Build>(() => (width) => optionsOf(chart, width), [chart]);
  const name = chart.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const label = `${chart.title}: ${chart.series.map((one) => one.name).join("; ")}`;
  return <ChartFigure title={chart.title} name={name} label={label} build={build} />;
}

function optionsOf(chart: PlanChart, width: number): PlotOptions {
  const { x_values, series } = chart;
  const legend = legendOf(series, width);
  // As many tick labels as fit side by side.
  const every = Math.ceil(((Math.max(...x_values.map(widthOf)) + 6) * x_values.length) / (width - LEFT));
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
      axisX({ ...axis, label: chart.x_label, ticks: x_values.filter((_, i) => i % every === 0) }),
      axisY({ ...axis, label: chart.y_label, ticks, tickFormat: FORMATS[chart.unit] }),
      ...legend.marks,
    ],
  };
}

interface PlotParts extends Pick<PlotOptions, "x" | "y"> {
  ticks: number | number[];
  marks: Markish[];
}

function barsOf(chart: PlanChart): PlotParts {
  const { x_values, series } = chart;
  const totals = x_values.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] ?? 0), 0));
  const ticks = chart.unit === "bytes" ? multiplesUpTo(Math.max(...totals)) : 5;
  const rows = series.flatMap((one) => rowsOf(chart, one));
  return {
    x: { type: "band", domain: x_values, padding: 0.28 },
    y: typeof ticks === "number" ? { nice: ticks } : { domain: [0, ticks.at(-1)] },
    ticks,
    marks: [barY(rows, { ...CHANNELS, title: "title", fill: "colour" }), ruleY([0], { stroke: "var(--muted)" })],
  };
}

function linesOf(chart: PlanChart): PlotParts {
  const all = chart.series.map((one) => ({ ...one, rows: rowsOf(chart, one), colour: colourOf(one) }));
  const ticks = powersAround(all.flatMap((one) => one.rows.map((row) => row.value)));
  return {
    x: { type: "point", domain: chart.x_values, padding: 0.4 },
    y: { type: "log", base: 2, domain: [ticks[0], ticks.at(-1)] },
    ticks,
    marks: all.flatMap(({ rows, colour, dashed }) => [
      line(rows, { ...CHANNELS, stroke: colour, strokeWidth: 2.2, strokeDasharray: dashed ? "6,4" : undefined }),
      dot(rows, { ...CHANNELS, title: "title", fill: colour, r: 3.4 }),
    ]),
  };
}

/** The values of a series, with tooltips. */
function rowsOf({ x_values, x_label, unit }: PlanChart, one: Series) {
  return x_values.flatMap((x, i) => {
    const value = one.values[i];
    if (!value) return [];
    return { x, value, colour: colourOf(one), title: `${x} ${x_label}: ${one.name} ${FORMATS[unit](value)}` };
  });
}

/** The legend above the frame, part of the drawing so that a saved file has it. */
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
      dot([one], { ...at, dx: x + 5, symbol: "square", r: 5, fill: colourOf(one) }),
      text([one.name], { ...at, dx: x + SWATCH, textAnchor: "start", lineAnchor: "middle", fontSize: 12 }),
    ];
  });
  return { height, marks };
}
