/** Head importance: all heads ranked, with standard errors. */
import { axisX, axisY, barX, link, ruleX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Head } from "../data";
import { ChartFigure, widthOf, type Build } from "../parts/chart";
import { useLocale } from "../parts/language";
import type { Route } from "../parts/router";
import { numberColumn, SortableTable, type TableColumn } from "../parts/sortable-table";
import { axisLabel, ColumnRamp } from "./column-name";
import { headColumn } from "./head-link";
import { idOf, keyOf, markedIn, useModel, withUnit } from "./model";
import { rolesColumn } from "./role-chips";
import { StackGrids } from "./stack-grid";

const SHOWN = 25;
const ROW = 19;
const ERRORS = 1.96; // standard errors of a 95% interval of a normal distribution

export function Importance({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t, text, number } = locale;
  const { importance } = model.page;
  const column = importance ? model.column(importance.column) : undefined;
  const marks = useMemo(() => markedIn(route.query.mark), [route.query.mark]);
  const ranked = useMemo(() => model.ranked(), [model]);

  const build = useMemo<Build>(
    () => (width) => {
      const rows = ranked.slice(0, SHOWN).map((head) => {
        const value = model.value(head, column?.name ?? "") as number;
        const error = ERRORS * (model.value(head, `${column?.name}_error`) ?? 0);
        const fill = marks.has(keyOf(idOf(head))) ? "var(--second)" : "var(--first)";
        return { name: model.shortName(idOf(head), locale), value, low: value - error, high: value + error, fill };
      });
      const intervals = rows.filter((row) => row.high > row.low);
      return {
        width,
        height: ROW * rows.length + 46,
        marginTop: 40,
        marginLeft: Math.max(30, ...rows.map((row) => widthOf(row.name))) + 14,
        marginRight: 20,
        x: { grid: true },
        y: { type: "band", domain: rows.map((row) => row.name), padding: 0.25 },
        marks: [
          barX(rows, { x: "value", y: "name", fill: "fill", fillOpacity: 0.75 }),
          link(intervals, { x1: "low", x2: "high", y1: "name", y2: "name", stroke: "var(--ink)", strokeWidth: 1.2 }),
          ruleX([0], { stroke: "var(--muted)" }),
          axisX({
            anchor: "top",
            label: column ? axisLabel(column, locale) : null,
            labelAnchor: "center",
            labelArrow: "none",
            ticks: Math.floor(width / 110),
          }),
          axisY({ label: null, tickSize: 0, fontSize: 12 }),
        ],
      };
    },
    [ranked, column, locale, marks],
  );

  const best = ranked[0];
  if (!importance || !column || !best) {
    return (
      <>
        <h2 tabIndex={-1}>{t("importance")}</h2>
        <p>{t("noImportance")}</p>
      </>
    );
  }
  const name = model.fullName(idOf(best), locale);
  const format = (value: number | null | undefined) => number(value, column.format);
  const columns: TableColumn<Head>[] = [
    headColumn("head", t("head"), idOf),
    {
      ...numberColumn("value", text(importance.label), (head: Head) => model.value(head, column.name), format),
      code: column.name,
    },
    {
      ...numberColumn("error", t("standardError"), (head: Head) => model.value(head, `${column.name}_error`), format),
      code: `${column.name}_error`,
    },
    rolesColumn(model, t("roles")),
  ];
  return (
    <>
      <h2 tabIndex={-1}>{t("importance")}</h2>
      <p class="lead">
        <strong>{t("mostImportant", { head: name })}</strong> {text(importance.about)}
      </p>
      <div class="two">
        <ChartFigure
          title={t("ranking", { count: Math.min(SHOWN, ranked.length) })}
          note={t("rankingAbout")}
          name="importance"
          label={t("rankingDescribed", {
            head: name,
            value: withUnit(model.value(best, column.name), column.format, locale),
          })}
          build={build}
        />
        <div>
          <ColumnRamp column={column} />
          <StackGrids color={column.name} marks={marks} />
        </div>
      </div>
      <h3>{t("allHeads")}</h3>
      <SortableTable
        label={t("importance")}
        columns={columns}
        rows={ranked}
        keyOf={(head) => keyOf(idOf(head))}
        marked={(head) => marks.has(keyOf(idOf(head)))}
        route={route}
        order="value-down"
      />
    </>
  );
}
