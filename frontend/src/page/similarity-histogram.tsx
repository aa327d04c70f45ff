/** Histogram of the cosine similarities of all pairs of heads of a layer. */
import { axisX, axisY, binX, rectY, ruleY } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { ChartFigure, type Build } from "../parts/chart";
import { useLocale } from "../parts/language";
import { useModel } from "./model";
import { pairsOf, DEFAULT_RELATION } from "./relations";

export function SimilarityHistogram(): JSX.Element | null {
  const model = useModel();
  const locale = useLocale();
  const { t, count } = locale;
  const cosines = useMemo(() => pairsOf(model, DEFAULT_RELATION).map((pair) => pair.value), [model]);
  const build = useMemo<Build>(
    () => (width) => {
      const bins = binX({ y: "count" }, { x: (x: number) => x, thresholds: 40 });
      return {
        width,
        height: 250,
        marginTop: 26, // the label of the axis
        marginLeft: 44,
        marginBottom: 40,
        x: { domain: [Math.min(-0.2, ...cosines), 1] },
        y: { grid: true },
        marks: [
          rectY(cosines, { ...bins, fill: "var(--first)", inset: 0.5 }),
          ruleY([0], { stroke: "var(--muted)" }),
          axisX({ label: t("cosine"), labelArrow: "none", ticks: 6 }),
          axisY({ label: t("pairsOfHeads"), labelArrow: "none", ticks: 4, tickFormat: (x: number) => count(x) }),
        ],
      };
    },
    [cosines, locale],
  );
  if (!cosines.length) return null;
  return (
    <ChartFigure
      title={t("similarityTitle")}
      note={t("similarityNote")}
      name="similarity"
      label={t("similarityDescribed", { pairs: count(cosines.length) })}
      build={build}
    />
  );
}
