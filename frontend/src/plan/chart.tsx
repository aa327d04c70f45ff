/** A chart of a plan (report/plan_payload.py): lines on a logarithmic axis, and rules with labels. */
import { axisX, axisY, dot, gridY, line, ruleY, text, type Markish, type PlotOptions } from "@observablehq/plot";
import type { ComponentChildren, JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Text } from "../data";
import { ChartFigure, widthOf, type Build } from "../parts/chart";
import { useLocale, type Language } from "../parts/language";
import { FORMATS, tickLabel, TICKS } from "./quantities";

interface Series {
  name: Text;
  values: number[];
  colour: number;
  dashed: boolean;
  wide: boolean;
}

export interface PlanChart {
  title: Text;
  unit: keyof typeof FORMATS;
  x_label: Text;
  y_label: Text;
  x_values: string[];
  series: Series[];
  rules: { label: string; value: number }[];
}

const [LEFT, ROW, SWATCH] = [82, 18, 26];
const HEIGHT = 226; // of the frame
const CHANNELS = { x: "x", y: "value" };
const colourOf = (one: Series) => `var(--p${one.colour})`;

export function PlanFigure({ chart, controls }: { chart: PlanChart; controls?: ComponentChildren }): JSX.Element {
  const { language } = useLocale();
  const build = useMemo<Build>(() => (width) => optionsOf(chart, width, language), [chart, language]);
  const title = chart.title[language];
  const name = chart.title.en.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const label = `${title}: ${chart.series.map((one) => one.name[language]).join("; ")}`;
  return <ChartFigure title={title} name={name} label={label} build={build} controls={controls} />;
}

function optionsOf(chart: PlanChart, width: number, language: Language): PlotOptions {
  const { x_values, series, unit } = chart;
  const legend = legendOf(series, width, language);
  const all = series.map((one) => ({ ...one, rows: rowsOf(chart, one, language), colour: colourOf(one) }));
  const values = all.flatMap((one) => one.rows.map((row) => row.value));
  const ticks = TICKS[unit](values);
  const [low = 0, high = 0] = [ticks[0], ticks.at(-1)];
  const rules = chart.rules.filter(({ value }) => value > low && value < high);
  const labels = labelled(rules, high / low);
  const right = 12 + Math.max(0, ...labels.map(({ label }) => widthOf(label)));
  // As many tick labels as fit side by side.
  const every = Math.ceil(((Math.max(...x_values.map(widthOf)) + 6) * x_values.length) / (width - LEFT - right));
  const axis = { labelAnchor: "center", labelArrow: "none", tickSize: 0, fontSize: 12 } as const;
  return {
    width,
    height: HEIGHT + 54 + legend.height,
    marginTop: legend.height + 12,
    marginLeft: LEFT,
    marginRight: right,
    marginBottom: 42,
    x: { type: "point", domain: x_values, padding: 0.4 },
    y: { type: "log", domain: [low, high] },
    marks: [
      gridY({ ticks, stroke: "var(--line)", strokeOpacity: 1 }),
      ruleY(rules, { y: "value", stroke: "var(--muted)", strokeDasharray: "2,3" }),
      text(labels, {
        y: "value",
        text: "label",
        frameAnchor: "right",
        textAnchor: "start",
        dx: 6,
        fontSize: 12,
        fill: "var(--muted)",
      }),
      ...all.flatMap(({ rows, colour, dashed, wide }) => [
        line(rows, {
          ...CHANNELS,
          stroke: colour,
          strokeWidth: wide ? 4 : 2,
          strokeDasharray: dashed ? "6,4" : undefined,
        }),
        dot(rows, { ...CHANNELS, title: "title", fill: colour, r: wide ? 4.5 : 3.2 }),
      ]),
      axisX({ ...axis, label: chart.x_label[language], ticks: x_values.filter((_, i) => i % every === 0) }),
      // `text` instead of `tickFormat`, from which Plot leaves out some labels of a logarithmic axis.
      axisY({ ...axis, label: chart.y_label[language], ticks, text: (value: number) => tickLabel(value, unit) }),
      ...legend.marks,
    ],
  };
}

/** Rules with their labels; one too close to the labelled one below shares its label. */
function labelled(rules: PlanChart["rules"], span: number) {
  const labels: { label: string; value: number }[] = [];
  for (const { label, value } of rules) {
    const last = labels.at(-1);
    const unit = label.slice(label.indexOf(" "));
    const isClose = last && Math.log(value / last.value) / Math.log(span) < 14 / HEIGHT;
    if (isClose) last.label = `${last.label.endsWith(unit) ? last.label.slice(0, -unit.length) : last.label}, ${label}`;
    else labels.push({ label, value });
  }
  return labels;
}

/** The values of a series, with tooltips. */
function rowsOf({ x_values, x_label, unit }: PlanChart, one: Series, language: Language) {
  return x_values.flatMap((x, i) => {
    const value = one.values[i];
    if (!value) return [];
    return { x, value, title: `${x} ${x_label[language]}: ${one.name[language]} ${FORMATS[unit](value)}` };
  });
}

/** The legend above the frame, part of the drawing so that a saved file has it. */
function legendOf(series: Series[], width: number, language: Language): { height: number; marks: Markish[] } {
  let [next, row] = [0, 0];
  const placed = series.map((one) => {
    const name = one.name[language];
    const wide = SWATCH + widthOf(name);
    if (next > 0 && next + wide > width) [next, row] = [0, row + 1];
    const at = { x: next - LEFT, y: row * ROW };
    next += wide + 20;
    return { one, name, ...at };
  });
  const height = (row + 1) * ROW;
  const marks = placed.flatMap(({ one, name, x, y }) => {
    const at = { frameAnchor: "top-left", dy: y - height } as const;
    // A bar, or two parts of it for a dashed line.
    const dashes = one.dashed ? [2, 13] : [2, 7, 12];
    return [
      ...dashes.map((dx) => dot([one], { ...at, dx: x + dx + 2, symbol: "square", r: 3, fill: colourOf(one) })),
      text([name], { ...at, dx: x + SWATCH, textAnchor: "start", lineAnchor: "middle", fontSize: 12 }),
    ];
  });
  return { height, marks };
}
