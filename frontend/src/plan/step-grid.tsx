/** Layers and heads of a training run at one step, chosen with a slider. */
import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { part, unpack, type Packed } from "../data";
import { scaleOf } from "../parts/colour";
import { HeatMap } from "../parts/heat-map";
import { useLocale } from "../parts/language";
import { RampLegend } from "../parts/legend";

export interface Grid {
  steps: number[];
  /** One row per step, one column per head. */
  values: Packed;
}

const format = (value: number) => (Number.isNaN(value) ? "–" : value.toPrecision(3));

/** True in dark mode. The charts of this page are not inside the frame that provides it. */
function usePageDark(): boolean {
  const read = () => document.documentElement.dataset.theme === "dark";
  const [dark, set] = useState(read);
  useEffect(() => {
    const observer = new MutationObserver(() => set(read()));
    observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    set(read());
    return () => observer.disconnect();
  }, []);
  return dark;
}

export function StepGrid({ grid, panels }: { grid: Grid; panels: { lines: string[] }[] }): JSX.Element {
  const { language } = useLocale();
  const dark = usePageDark();
  const [at, choose] = useState(grid.steps.length - 1);
  const [hovered, hover] = useState<number | null>(null);
  const all = unpack(grid.values);
  const scale = useMemo(() => {
    const finite = [...all.values].filter((value) => !Number.isNaN(value));
    const [low, high] = finite.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
    return scaleOf(Math.min(low, high), Math.max(low, high), dark);
  }, [all, dark]);
  const columns = Math.max(...panels.map(({ lines }) => lines.length));
  const [names, values] = useMemo(() => {
    const own = part(all, at).values;
    let next = 0;
    const cells = panels.flatMap(({ lines }) =>
      Array.from({ length: columns }, (_, i) => [lines[i] ?? "", i in lines ? (own[next++] as number) : NaN] as const),
    );
    return [cells.map(([name]) => name), cells.map(([, value]) => value)];
  }, [all, at, panels, columns]);
  const step = `${language === "zh" ? "步" : "step"} ${grid.steps[at]}`;
  const name = hovered === null ? "" : names[hovered];
  return (
    <div class="step-grid">
      <p>
        <input
          type="range"
          min={0}
          max={grid.steps.length - 1}
          value={at}
          aria-label={language === "zh" ? "步" : "Step"}
          aria-valuetext={step}
          onInput={(event) => choose(Number(event.currentTarget.value))}
        />{" "}
        <output>
          {step}
          {name ? `, ${name}: ${format(values[hovered as number] as number)}` : ""}
        </output>
      </p>
      <div style={{ height: `${22 * panels.length}px`, maxWidth: `${44 * columns}px`, marginBottom: "0.75rem" }}>
        <HeatMap
          rows={panels.length}
          columns={columns}
          values={values}
          scale={scale}
          label={step}
          onHover={(cell) => hover(cell && cell[0] * columns + cell[1])}
        />
      </div>
      <RampLegend scale={scale} format={format} />
    </div>
  );
}
