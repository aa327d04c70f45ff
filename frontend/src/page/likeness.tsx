/** How alike heads are in general: the cosines of all pairs, what chance reaches, and what counts as the same. */
import { axisX, axisY, binX, rectY, ruleX, ruleY, text as textMark } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { ChartFigure, type Build } from "../parts/chart";
import { useWords } from "../parts/language";
import { useModel } from "./model";
import { pairsOf, PREFERRED } from "./relations";

export function LikenessFigure(): JSX.Element | null {
  const model = useModel();
  const words = useWords();
  const { say, number, count } = words;
  const { likeness } = model.page;
  const cosines = useMemo(() => pairsOf(model, PREFERRED).map((pair) => pair.value), [model]);
  const build = useMemo<Build>(
    () => (width) => {
      const lines = likeness
        ? [
            { at: likeness.null, name: say("chance"), colour: "var(--second)", dy: -20 },
            { at: likeness.threshold, name: say("threshold"), colour: "var(--ink)", dy: -4 },
          ]
        : [];
      return {
        width,
        height: 230,
        marginTop: 40,
        marginLeft: 44,
        marginBottom: 40,
        x: { domain: [Math.min(-0.2, ...cosines), 1] },
        y: { grid: true },
        marks: [
          rectY(cosines, {
            ...binX({ y: "count" }, { x: (x: number) => x, thresholds: 40 }),
            fill: "var(--first)",
            inset: 0.5,
          }),
          ruleX(lines, { x: "at", stroke: "colour", strokeWidth: 1.5 }),
          ...lines.map((line) =>
            textMark([line], {
              x: "at",
              frameAnchor: "top",
              dy: line.dy,
              lineAnchor: "bottom",
              text: () => `${line.name} ${number(line.at)}`,
              fill: line.colour,
              fontSize: 12,
            }),
          ),
          ruleY([0], { stroke: "var(--muted)" }),
          axisX({ label: say("cosine"), labelArrow: "none", ticks: 6 }),
          axisY({ label: say("pairsOfHeads"), labelArrow: "none", ticks: 4, tickFormat: (x: number) => count(x) }),
        ],
      };
    },
    [cosines, likeness, words],
  );
  if (!cosines.length) return null;
  const above = likeness ? cosines.filter((cosine) => cosine >= likeness.threshold).length : 0;
  return (
    <ChartFigure
      title={say("likenessTitle")}
      note={say("likenessNote")}
      name="likeness"
      label={say("likenessDescribed", { pairs: count(cosines.length), above: count(above) })}
      build={build}
    />
  );
}
