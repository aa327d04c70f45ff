/** Small multiples of a training run (report/training_page.py): a panel per layer, a line per head over the steps. */
import { axisX, axisY, frame, gridY, line, text, type PlotOptions } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { part, unpack, type Packed, type Text } from "../data";
import { ChartFigure, type Build } from "../parts/chart";
import { useLocale, type Language } from "../parts/language";
import { StepGrid, type Grid } from "./step-grid";

export interface PanelChart {
  title: Text;
  x_label: Text;
  y_label: Text;
  /** First and last step of the run. */
  domain: [number, number];
  steps: number[];
  panels: { label: Text; lines: string[] }[];
  /** One row per line of all panels, one column per step; NaN is a gap. */
  values: Packed;
  grid: Grid | null;
}

const [LEFT, PANEL, COLOURS] = [58, 170, 8];
const PLACE = { fx: "fx", fy: "fy" } as const;

export function PanelFigure({ chart }: { chart: PanelChart }): JSX.Element {
  const { language } = useLocale();
  const build = useMemo<Build>(() => (width) => optionsOf(chart, width, language), [chart, language]);
  const title = chart.title[language];
  const name = chart.title.en.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const label = `${title}: ${chart.panels.map((panel) => panel.label[language]).join("; ")}`;
  return (
    <>
      <ChartFigure title={title} name={name} label={label} build={build} />
      {chart.grid ? <StepGrid grid={chart.grid} panels={chart.panels} /> : null}
    </>
  );
}

function optionsOf(chart: PanelChart, width: number, language: Language): PlotOptions {
  const columns = Math.max(1, Math.min(chart.panels.length, Math.floor((width - LEFT) / PANEL)));
  const values = unpack(chart.values);
  let row = 0;
  const panels = chart.panels.map(({ label, lines }, i) => {
    const place = { fx: i % columns, fy: Math.floor(i / columns) };
    const points = lines.map((name) => {
      const { values: own } = part(values, row++);
      return chart.steps.map((step, at) => ({ ...place, name, step, value: own[at] as number }));
    });
    return { ...place, label: label[language], points };
  });
  const rows = Math.ceil(chart.panels.length / columns);
  const axis = { labelAnchor: "center", labelArrow: "none", tickSize: 0, fontSize: 12, ticks: 3 } as const;
  const colours = Array.from({ length: COLOURS }, (_, colour) =>
    panels.flatMap(({ points }) => points.filter((_, i) => i % COLOURS === colour).flat()),
  );
  return {
    width,
    height: rows * (rows > 1 ? 110 : 200) + 62,
    marginTop: 20,
    marginLeft: LEFT,
    marginRight: 12,
    marginBottom: 42,
    x: { domain: chart.domain },
    y: { nice: true },
    fx: { axis: null, padding: 0.08 },
    fy: { axis: null, padding: 0.22 },
    marks: [
      frame({ stroke: "var(--line)" }),
      gridY({ ticks: 3, stroke: "var(--line)", strokeOpacity: 1 }),
      ...colours.map((points, colour) =>
        line(points, { ...PLACE, x: "step", y: "value", z: "name", title: "name", stroke: `var(--p${colour})`, strokeWidth: 1.3 }),
      ),
      text(panels, { ...PLACE, text: "label", frameAnchor: "top-left", textAnchor: "start", dy: -13, fontSize: 12 }),
      axisX({ ...axis, label: chart.x_label[language], facetAnchor: "bottom-empty" }),
      axisY({ ...axis, label: chart.y_label[language], facetAnchor: "left" }),
    ],
  };
}
