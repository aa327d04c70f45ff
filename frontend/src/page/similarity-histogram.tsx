/** Histogram of the cosine similarities of all pairs, with the chance level and the redundancy threshold. */
import { axisX, axisY, binX, rectY, ruleX, ruleY, text as textMark } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { ChartFigure, type Build } from "../parts/chart";
import { useLocale } from "../parts/language";
import { useModel } from "./model";
import { pairsOf, DEFAULT_RELATION } from "./relations";

const LABEL = { frameAnchor: "top", lineAnchor: "bottom", fontSize: 12 } as const;

export function SimilarityHistogram(): JSX.Element | null {
  const model = useModel();
  const locale = useLocale();
  const { t, number, count } = locale;
  const { redundancy } = model.page;
  const cosines = useMemo(() => pairsOf(model, DEFAULT_RELATION).map((pair) => pair.value), [model]);
  const build = useMemo<Build>(
    () => (width) => {
      const lines = redundancy
        ? [
            { at: redundancy.null, name: t("keyChance"), colour: "var(--second)", dy: -20 },
            { at: redundancy.threshold, name: t("threshold"), colour: "var(--ink)", dy: -4 },
          ]
        : [];
      const bins = binX({ y: "count" }, { x: (x: number) => x, thresholds: 40 });
      return {
        width,
        height: 250,
        marginTop: 58, // the label of the axis, and one line for each rule
        marginLeft: 44,
        marginBottom: 40,
        x: { domain: [Math.min(-0.2, ...cosines), 1] },
        y: { grid: true },
        marks: [
          rectY(cosines, { ...bins, fill: "var(--first)", inset: 0.5 }),
          ruleX(lines, { x: "at", stroke: "colour", strokeWidth: 1.5 }),
          ...lines.map(({ at, name, colour, dy }) =>
            textMark([`${name} ${number(at)}`], { ...LABEL, x: () => at, text: (x: string) => x, dy, fill: colour }),
          ),
          ruleY([0], { stroke: "var(--muted)" }),
          axisX({ label: t("cosine"), labelArrow: "none", ticks: 6 }),
          axisY({ label: t("pairsOfHeads"), labelArrow: "none", ticks: 4, tickFormat: (x: number) => count(x) }),
        ],
      };
    },
    [cosines, redundancy, locale],
  );
  if (!cosines.length) return null;
  const above = redundancy ? cosines.filter((cosine) => cosine >= redundancy.threshold).length : 0;
  return (
    <ChartFigure
      title={t("similarityTitle")}
      note={t("similarityNote")}
      name="similarity"
      label={t("similarityDescribed", { pairs: count(cosines.length), above: count(above) })}
      build={build}
    />
  );
}
