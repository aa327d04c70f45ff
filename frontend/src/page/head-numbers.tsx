/** One head's numbers, each with a strip that shows where it lies among all heads. */
import { dot, text as textMark, tickX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Column, ColumnGroup, Head } from "../data";
import { Chart, drawPlot, widthOf, type Build } from "../parts/chart";
import { Figure } from "../parts/figure";
import { useWords, type Words } from "../parts/language";
import { isNumber, useModel, withUnit, type Model } from "./model";

const GROUPS: ColumnGroup[] = ["looks", "writes", "matters", "other"];
const STRIP = 22;

/** How many heads have less. */
function rankOf(model: Model, column: Column, value: number): number {
  return model.values(column.name).filter((other) => other > value).length + 1;
}

export function HeadNumbers({ head }: { head: Head }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const { say } = words;
  const columns = GROUPS.flatMap((group) => model.page.columns.filter((column) => column.group === group)).filter(
    (column) => isNumber(head.values[column.name]),
  );
  return (
    <Figure
      class="wide"
      title={say("numbers")}
      note={say("numbersAbout")}
      name={`head-${head.site}-${head.head}-numbers`}
      fileTitle={`${model.long([head.site, head.head], words)}: ${say("numbers")}`}
      draw={() => stripsSvg(model, head, columns, words)}
    >
      <div class="table-scroll" tabIndex={0} role="region" aria-label={say("numbers")}>
        <table class="numbers">
          <thead>
            <tr>
              <th scope="col">{say("number")}</th>
              <th scope="col" class="numeric">
                {say("value")}
              </th>
              <th scope="col" class="numeric">
                {say("chance")}
              </th>
              <th scope="col" class="numeric">
                {say("rank")}
              </th>
              <th scope="col">{say("amongAll")}</th>
            </tr>
          </thead>
          <tbody>
            {columns.map((column) => (
              <NumberRow key={column.name} head={head} column={column} />
            ))}
          </tbody>
        </table>
      </div>
    </Figure>
  );
}

function NumberRow({ head, column }: { head: Head; column: Column }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const { say, text, number } = words;
  const value = head.values[column.name] as number;
  const error = head.errors[column.name];
  const spread = head.spreads[column.name];
  const chance = head.chances[column.name];
  const all = useMemo(() => model.values(column.name), [model, column]);
  const rank = rankOf(model, column, value);
  const known = [...all, ...(isNumber(chance) ? [chance] : [])];
  const build = useMemo<Build>(
    () => (width) => ({
      width,
      height: STRIP,
      margin: 0,
      marginLeft: 6,
      marginRight: 6,
      axis: null,
      x: { domain: [Math.min(...known), Math.max(...known)] },
      marks: [
        tickX(all, { x: (x: number) => x, stroke: "var(--muted)", strokeOpacity: 0.45, inset: 3 }),
        tickX(isNumber(chance) ? [chance] : [], { x: (x: number) => x, stroke: "var(--second)", strokeWidth: 2 }),
        dot([value], { x: (x: number) => x, r: 5, fill: "var(--first)", stroke: "var(--paper)", strokeWidth: 1.5 }),
      ],
    }),
    [all, value, chance],
  );
  const ends = (values: number[]) =>
    [Math.min(...values), Math.max(...values)].map((x) => number(x, column.format)) as [string, string];
  const [low, high] = ends(known);
  const [least, most] = ends(all);
  return (
    <tr>
      <th scope="row">
        <details>
          <summary>{text(column.label)}</summary>
          <p>{text(column.about)}</p>
          {isNumber(spread) ? <p class="muted">{say("spread", { spread: number(spread, column.format) })}</p> : null}
        </details>
      </th>
      <td class="numeric">
        {withUnit(value, column.format, words)}
        {isNumber(error) ? <span class="muted"> ± {number(error, column.format)}</span> : null}
      </td>
      <td class="numeric muted">{isNumber(chance) ? number(chance, column.format) : ""}</td>
      <td class="numeric muted">{say("rankOf", { rank, all: all.length })}</td>
      <td class="strip-cell">
        <div class="strip">
          <span class="strip-end">{low}</span>
          <Chart
            build={build}
            label={say("stripDescribed", { low: least, high: most, rank, all: all.length })}
          />
          <span class="strip-end">{high}</span>
        </div>
      </td>
    </tr>
  );
}

/** All strips in one drawing, for a file. */
function stripsSvg(model: Model, head: Head, columns: Column[], words: Words): SVGSVGElement {
  const share = (column: Column, value: number) => {
    const all = model.values(column.name);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    return high > low ? (value - low) / (high - low) : 0.5;
  };
  const label = (column: Column) => words.text(column.label);
  const others = columns.flatMap((column) =>
    model.values(column.name).map((value) => ({ row: label(column), at: share(column, value) })),
  );
  const own = columns.map((column) => {
    const value = head.values[column.name] as number;
    return { row: label(column), at: share(column, value), words: withUnit(value, column.format, words) };
  });
  return drawPlot(
    {
      width: 760,
      height: 26 * columns.length + 20,
      marginTop: 10,
      marginLeft: Math.max(...columns.map((column) => widthOf(label(column)))) + 20,
      marginRight: 110,
      x: { axis: null, domain: [0, 1] },
      y: { type: "band", label: null, domain: columns.map(label) },
      marks: [
        tickX(others, { x: "at", y: "row", stroke: "var(--muted)", strokeOpacity: 0.45, inset: 4 }),
        dot(own, { x: "at", y: "row", r: 5, fill: "var(--first)" }),
        textMark(own, { x: 1, y: "row", text: "words", textAnchor: "start", dx: 12, fill: "var(--ink)" }),
      ],
    },
    words.say("numbers"),
  );
}
