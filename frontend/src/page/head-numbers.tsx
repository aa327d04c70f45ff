/** Statistics of one head, each with a strip plot of all heads. */
import { dot, text as textMark, tickX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Column, Head } from "../data";
import { withCodeName } from "../parts/code-name";
import { Chart, drawPlot, strip, widthOf, type Build } from "../parts/chart";
import { TableRegion } from "../parts/controls";
import { Figure } from "../parts/figure";
import { useLocale, type Locale } from "../parts/language";
import { ColumnName, STATISTICS } from "./column-name";
import { idOf, isNumber, useModel, withUnit, type Model } from "./model";

/** The rank among all heads, from the largest. */
function rankOf(model: Model, column: Column, value: number): number {
  return model.values(column.name).filter((other) => other > value).length + 1;
}

export function HeadNumbers({ head }: { head: Head }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t } = locale;
  const columns = STATISTICS.flatMap((group) =>
    model.page.columns.filter((column) => column.group === group && model.value(head, column.name) !== null),
  );
  return (
    <Figure
      class="wide"
      title={t("numbers")}
      note={t("numbersAbout")}
      name={`head-${head.site}-${head.head}-numbers`}
      fileTitle={`${model.fullName(idOf(head), locale)}: ${t("numbers")}`}
      draw={() => stripsSvg(model, head, columns, locale)}
    >
      <TableRegion label={t("numbers")}>
        <table class="numbers">
          <thead>
            <tr>
              <th scope="col">{t("number")}</th>
              {(["value", "chance", "rank"] as const).map((name) => (
                <th scope="col" class="numeric">
                  {t(name)}
                </th>
              ))}
              <th scope="col">{t("amongAll")}</th>
            </tr>
          </thead>
          <tbody>
            {columns.map((column) => (
              <NumberRow key={column.name} head={head} column={column} />
            ))}
          </tbody>
        </table>
      </TableRegion>
    </Figure>
  );
}

function NumberRow({ head, column }: { head: Head; column: Column }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t, text, number } = locale;
  const value = model.value(head, column.name) as number;
  const [error, spread, chance] = ["error", "std", "chance"].map((end) => model.value(head, `${column.name}_${end}`));
  const all = useMemo(() => model.values(column.name), [model, column]);
  const rank = rankOf(model, column, value);
  const known = [...all, ...(isNumber(chance) ? [chance] : [])];
  const build = useMemo<Build>(
    () => (width) => ({
      ...strip(width, 22),
      x: { domain: [Math.min(...known), Math.max(...known)] },
      marks: [
        tickX(all, { x: (x: number) => x, stroke: "var(--muted)", strokeOpacity: 0.45, inset: 3 }),
        tickX(isNumber(chance) ? [chance] : [], { x: (x: number) => x, stroke: "var(--second)", strokeWidth: 2 }),
        dot([value].filter(isNumber), {
          x: (x: number) => x,
          r: 5,
          fill: "var(--first)",
          stroke: "var(--paper)",
          strokeWidth: 1.5,
        }),
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
          <summary>
            <ColumnName column={column} />
          </summary>
          <p>{text(column.about)}</p>
          {isNumber(spread) ? <p class="muted">{t("spread", { spread: number(spread, column.format) })}</p> : null}
        </details>
      </th>
      <td class="numeric">
        {withUnit(value, column.format, locale)}
        {isNumber(error) ? <span class="muted"> ± {number(error, column.format)}</span> : null}
      </td>
      <td class="numeric muted" data-label={t("chance")}>
        {isNumber(chance) ? number(chance, column.format) : ""}
      </td>
      <td class="numeric muted" data-label={t("rank")}>{t("rankOf", { rank, all: all.length })}</td>
      <td class="strip-cell">
        <div class="strip">
          <span class="strip-end">{low}</span>
          <Chart build={build} label={t("stripDescribed", { low: least, high: most, rank, all: all.length })} />
          <span class="strip-end">{high}</span>
        </div>
      </td>
    </tr>
  );
}

/** All strip plots as one drawing, for a file. */
function stripsSvg(model: Model, head: Head, columns: Column[], locale: Locale): SVGSVGElement {
  const share = (column: Column, value: number) => {
    const all = model.values(column.name);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    return high > low ? (value - low) / (high - low) : 0.5;
  };
  const label = (column: Column) => withCodeName(locale.text(column.label), column.name);
  const others = columns.flatMap((column) =>
    model.values(column.name).map((value) => ({ row: label(column), at: share(column, value) })),
  );
  const own = columns.map((column) => {
    const value = model.value(head, column.name) as number;
    return { row: label(column), at: Math.min(1, share(column, value)), text: withUnit(value, column.format, locale) };
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
        textMark(own, { x: 1, y: "row", text: "text", textAnchor: "start", dx: 12, fill: "var(--ink)" }),
      ],
    },
    locale.t("numbers"),
  );
}
