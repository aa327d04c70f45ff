/** Dependency relations with their best heads, compared with the best fixed offset. */
import { dot, link, ruleX, tickX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { SyntaxRow } from "../data";
import { Chart, drawPlot, strip, widthOf, type Build } from "../parts/chart";
import { Figure } from "../parts/figure";
import { useLocale } from "../parts/language";
import type { Route } from "../parts/router";
import { numberColumn, SortableTable, type TableColumn } from "../parts/sortable-table";
import { Line } from "../parts/tokens";
import { isNumber, useModel } from "./model";
import { headColumn } from "./head-link";
import { INTERVAL, Key } from "./head-roles";

/** Accuracy above the baseline. */
function gainOf({ accuracy, baseline }: SyntaxRow): number | null {
  return isNumber(baseline) ? accuracy - baseline : null;
}

export function SyntaxView({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t, number, count } = locale;
  const { syntax } = model.page;
  if (!syntax) {
    return (
      <>
        <h2 tabIndex={-1}>{t("syntax")}</h2>
        <p>{t("noSyntax")}</p>
      </>
    );
  }
  const direction = (row: SyntaxRow) => t(row.direction === "head" ? "toHead" : "toDependent");
  const share = (value: number | null | undefined) => number(value, "share");
  const interval = ({ low, high }: SyntaxRow) =>
    isNumber(low) && isNumber(high) ? ` (${share(low)}–${share(high)})` : "";
  const columns: TableColumn<SyntaxRow>[] = [
    {
      name: "relation",
      label: t("syntaxRelation"),
      by: (row) => row.relation,
      show: (row) => <Line text={row.relation} />,
    },
    { name: "direction", label: t("direction"), by: direction, show: direction },
    headColumn("head", t("bestHead"), (row) => row.head),
    numberColumn(
      "accuracy",
      t("accuracy"),
      (row) => row.accuracy,
      (value, row) => share(value) + interval(row),
    ),
    numberColumn("baseline", t("baseline"), (row) => row.baseline, share),
    numberColumn("gain", t("gain"), gainOf, (_, row) => <Gain row={row} />),
    {
      name: "verdict",
      label: t("verdict"),
      by: (row) => ["worse", "", "better"].indexOf(row.verdict),
      show: (row) => t(`verdict_${row.verdict || "none"}`),
    },
    numberColumn(
      "offset",
      t("bestOffset"),
      (row) => row.offset,
      (value) => number(value),
    ),
    numberColumn(
      "words",
      t("wordCount"),
      (row) => row.words,
      (_, row) => count(row.words),
    ),
  ];
  return (
    <>
      <h2 tabIndex={-1}>{t("syntax")}</h2>
      <p class="lead">{t("syntaxAbout")}</p>
      <Figure
        title={t("syntaxTable")}
        note={
          <>
            {t("treebank")}: <Line text={syntax.treebank} />{" "}
            <span class="key">
              <Key mark="dot full" name={t("accuracy")} /> <Key mark="tick" name={t("baseline")} />
            </span>
          </>
        }
        name="syntax"
        draw={() => drawAll(syntax.rows, (row) => `${row.relation}, ${direction(row)}`)}
      >
        <SortableTable
          label={t("syntaxTable")}
          columns={columns}
          rows={syntax.rows}
          keyOf={(row) => `${row.relation} ${row.direction}`}
          route={route}
          order="gain-down"
        />
      </Figure>
    </>
  );
}

/** Accuracies with their intervals, and baselines as ticks; `y` places the rows. */
function marksOf(rows: SyntaxRow[], y: (row: SyntaxRow) => string | number = () => 0) {
  const intervals = rows.filter((row) => isNumber(row.low) && isNumber(row.high));
  const baselines = rows.filter((row) => isNumber(row.baseline));
  return [
    ruleX([0, 1], { stroke: "var(--line)" }),
    link(intervals, { x1: "low", x2: "high", y1: y, y2: y, ...INTERVAL }),
    tickX(baselines, { x: "baseline", y, stroke: "var(--second)", strokeWidth: 2 }),
    dot(rows, { x: "accuracy", y, r: 4.5, fill: "var(--first)" }),
  ];
}

function Gain({ row }: { row: SyntaxRow }): JSX.Element {
  const { t, number } = useLocale();
  const build = useMemo<Build>(
    () => (width) => ({
      ...strip(width, 18),
      x: { domain: [0, 1] },
      y: { type: "band", domain: [0] },
      marks: marksOf([row]),
    }),
    [row],
  );
  const gain = gainOf(row);
  return (
    <span class="gain">
      <Chart
        build={build}
        label={t("gainDescribed", {
          accuracy: number(row.accuracy, "share"),
          baseline: number(row.baseline, "share"),
        })}
      />
      <span>{gain === null ? "–" : `${gain >= 0 ? "+" : ""}${number(gain, "share")}`}</span>
    </span>
  );
}

function drawAll(rows: SyntaxRow[], name: (row: SyntaxRow) => string): SVGSVGElement {
  return drawPlot(
    {
      width: 760,
      height: 24 * rows.length + 50,
      marginLeft: Math.max(60, ...rows.map((row) => widthOf(name(row)))) + 14,
      x: { domain: [0, 1], grid: true },
      y: { type: "band", domain: rows.map(name), label: null },
      marks: marksOf(rows, name),
    },
    "",
  );
}
