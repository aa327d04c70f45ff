/** Which heads the model needs: each head's importance with its error, the largest first. */
import { axisX, axisY, barX, link, ruleX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Head } from "../data";
import { ChartFigure, widthOf, type Build } from "../parts/chart";
import { useWords } from "../parts/language";
import { changed, go, type Route } from "../parts/router";
import { SortableTable, type TableColumn } from "../parts/sortable-table";
import { keyOf, markedIn, useModel, withUnit } from "./model";
import { PlaceLink } from "./place-link";
import { RoleChips } from "./role-chips";
import { StackGrid } from "./stack-grid";

const SHOWN = 25;
const ROW = 19;
// About 95% of a normal distribution lies within so many standard errors.
const ERRORS = 1.96;

export function MattersView({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const { say, text, number } = words;
  const { importance, stacks } = model.page;
  const column = importance ? model.column(importance.column) : undefined;
  const marks = useMemo(() => markedIn(route.query.mark), [route.query.mark]);
  const ranked = useMemo(() => model.ranked(), [model]);

  const build = useMemo<Build>(
    () => (width) => {
      const rows = ranked.slice(0, SHOWN).map((head) => {
        const value = head.values[column?.name ?? ""] as number;
        const error = ERRORS * (head.errors[column?.name ?? ""] ?? 0);
        const marked = marks.has(keyOf([head.site, head.head]));
        return {
          name: model.short([head.site, head.head], words),
          value,
          low: value - error,
          high: value + error,
          marked,
        };
      });
      return {
        width,
        height: ROW * rows.length + 46,
        marginTop: 40,
        marginLeft: Math.max(30, ...rows.map((row) => widthOf(row.name))) + 14,
        marginRight: 20,
        x: { grid: true },
        y: { type: "band", domain: rows.map((row) => row.name), padding: 0.25 },
        marks: [
          barX(rows, {
            x: "value",
            y: "name",
            fill: (row) => (row.marked ? "var(--second)" : "var(--first)"),
            fillOpacity: 0.75,
          }),
          link(
            rows.filter((row) => row.high > row.low),
            {
              x1: "low",
              x2: "high",
              y1: "name",
              y2: "name",
              stroke: "var(--ink)",
              strokeWidth: 1.2,
            },
          ),
          ruleX([0], { stroke: "var(--muted)" }),
          axisX({
            anchor: "top",
            label: column ? text(column.label) : null,
            labelAnchor: "center",
            labelArrow: "none",
            ticks: Math.floor(width / 110),
          }),
          axisY({ label: null, tickSize: 0, fontSize: 12 }),
        ],
      };
    },
    [ranked, column, words, marks],
  );

  if (!importance || !column) {
    return (
      <>
        <h2 tabIndex={-1}>{say("matters")}</h2>
        <p>{say("noImportance")}</p>
      </>
    );
  }
  const best = ranked[0];
  const columns: TableColumn<Head>[] = [
    {
      name: "head",
      label: say("head"),
      by: (head) => head.site * 10_000 + head.head,
      show: (head) => <PlaceLink place={[head.site, head.head]} />,
    },
    {
      name: "value",
      label: text(importance.label),
      numeric: true,
      by: (head) => head.values[column.name] ?? null,
      show: (head) => number(head.values[column.name], column.format),
    },
    {
      name: "error",
      label: say("standardError"),
      numeric: true,
      by: (head) => head.errors[column.name] ?? null,
      show: (head) => number(head.errors[column.name], column.format),
    },
    {
      name: "roles",
      label: say("roles"),
      by: (head) => model.held(head)[0]?.role ?? null,
      show: (head) => <RoleChips head={head} />,
    },
  ];
  const here = { ...route, path: ["matters"] };
  return (
    <>
      <h2 tabIndex={-1}>{say("matters")}</h2>
      <p class="lead">
        {best ? <strong>{say("mattersMost", { head: model.long([best.site, best.head], words) })}</strong> : null}{" "}
        {text(importance.about)}
      </p>
      <div class="two">
        <ChartFigure
          title={say("ranking", { count: Math.min(SHOWN, ranked.length) })}
          note={say("rankingAbout")}
          name="importance"
          label={
            best
              ? say("rankingDescribed", {
                  head: model.long([best.site, best.head], words),
                  value: withUnit(best.values[column.name], column.format, words),
                })
              : say("noImportance")
          }
          build={build}
        />
        <div class="stacks">
          {stacks.map((stack, i) => (
            <StackGrid key={i} stack={stack} color={column.name} role="" marks={marks} onPoint={() => undefined} />
          ))}
        </div>
      </div>
      <h3>{say("everyHead")}</h3>
      <SortableTable
        label={say("matters")}
        columns={columns}
        rows={ranked}
        keyOf={(head) => keyOf([head.site, head.head])}
        marked={(head) => marks.has(keyOf([head.site, head.head]))}
        sorting={{ column: route.query.sort ?? "value", down: (route.query.order ?? "down") === "down" }}
        onSort={(next) => go(changed(here, { sort: next.column, order: next.down ? "down" : "up" }), true)}
      />
    </>
  );
}
