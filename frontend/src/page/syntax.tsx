/** Which grammatical relations a head knows, beside the best that a fixed distance could do. */
import { dot, link, ruleX, tickX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { SyntaxRow } from "../data";
import { Chart, drawPlot, widthOf, type Build } from "../parts/chart";
import { Figure } from "../parts/figure";
import { useWords } from "../parts/language";
import { changed, go, type Route } from "../parts/router";
import { SortableTable, type TableColumn } from "../parts/sortable-table";
import { Line } from "../parts/tokens";
import { isNumber, useModel } from "./model";
import { PlaceLink } from "./place-link";

export function SyntaxView({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const { say, number, count } = words;
  const { syntax } = model.page;
  if (!syntax) {
    return (
      <>
        <h2 tabIndex={-1}>{say("syntax")}</h2>
        <p>{say("noSyntax")}</p>
      </>
    );
  }
  const way = (row: SyntaxRow) => say(row.direction === "head" ? "toHead" : "toDependent");
  const columns: TableColumn<SyntaxRow>[] = [
    {
      name: "relation",
      label: say("syntaxRelation"),
      by: (row) => row.relation,
      show: (row) => <Line text={row.relation} />,
    },
    { name: "direction", label: say("direction"), by: way, show: way },
    {
      name: "head",
      label: say("bestHead"),
      by: (row) => row.head[0] * 10_000 + row.head[1],
      show: (row) => <PlaceLink place={row.head} />,
    },
    {
      name: "accuracy",
      label: say("accuracy"),
      numeric: true,
      by: (row) => row.accuracy,
      show: (row) =>
        isNumber(row.low) && isNumber(row.high)
          ? `${number(row.accuracy, "share")} (${number(row.low, "share")}–${number(row.high, "share")})`
          : number(row.accuracy, "share"),
    },
    {
      name: "baseline",
      label: say("baseline"),
      numeric: true,
      by: (row) => row.baseline,
      show: (row) => number(row.baseline, "share"),
    },
    {
      name: "gain",
      label: say("gain"),
      numeric: true,
      by: (row) => (isNumber(row.baseline) ? row.accuracy - row.baseline : null),
      show: (row) => <Gain row={row} />,
    },
    {
      name: "verdict",
      label: say("verdict"),
      by: (row) => ["worse", "", "better"].indexOf(row.verdict),
      show: (row) => say(`verdict_${row.verdict || "none"}`),
    },
    {
      name: "offset",
      label: say("bestOffset"),
      numeric: true,
      by: (row) => row.offset,
      show: (row) => number(row.offset),
    },
    { name: "words", label: say("wordsSeen"), numeric: true, by: (row) => row.words, show: (row) => count(row.words) },
  ];
  const here = { ...route, path: ["syntax"] };
  return (
    <>
      <h2 tabIndex={-1}>{say("syntax")}</h2>
      <p class="lead">{say("syntaxAbout")}</p>
      <Figure
        title={say("syntaxTable")}
        note={
          <>
            {say("treebank")}: <Line text={syntax.treebank} />
          </>
        }
        name="syntax"
        draw={() => drawAll(syntax.rows, (row) => `${row.relation}, ${way(row)}`)}
      >
        <SortableTable
          label={say("syntaxTable")}
          columns={columns}
          rows={syntax.rows}
          keyOf={(row) => `${row.relation} ${row.direction}`}
          sorting={{ column: route.query.sort ?? "gain", down: (route.query.order ?? "down") === "down" }}
          onSort={(next) => go(changed(here, { sort: next.column, order: next.down ? "down" : "up" }), true)}
        />
      </Figure>
    </>
  );
}

const marksOf = (rows: SyntaxRow[], y?: (row: SyntaxRow) => string) => [
  ruleX([0, 1], { stroke: "var(--line)" }),
  link(
    rows.filter((row) => isNumber(row.low) && isNumber(row.high)),
    {
      x1: "low",
      x2: "high",
      ...(y ? { y1: y, y2: y } : { y1: 0, y2: 0 }),
      stroke: "var(--first)",
      strokeWidth: 3,
      strokeOpacity: 0.55,
    },
  ),
  tickX(
    rows.filter((row) => isNumber(row.baseline)),
    { x: "baseline", ...(y ? { y } : {}), stroke: "var(--second)", strokeWidth: 2 },
  ),
  dot(rows, { x: "accuracy", y: y ?? (() => 0), r: 4.5, fill: "var(--first)" }),
];

/** Accuracy with its interval, and the baseline as a tick. */
function Gain({ row }: { row: SyntaxRow }): JSX.Element {
  const { say, number } = useWords();
  const build = useMemo<Build>(
    () => (width) => ({
      width,
      height: 18,
      margin: 0,
      marginLeft: 6,
      marginRight: 6,
      axis: null,
      x: { domain: [0, 1] },
      y: { domain: [-1, 1] },
      marks: marksOf([row]),
    }),
    [row],
  );
  const gain = isNumber(row.baseline) ? row.accuracy - row.baseline : null;
  return (
    <span class="gain">
      <Chart
        build={build}
        label={say("gainDescribed", {
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
