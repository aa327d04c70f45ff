/** All heads as a table that sorts by any of its columns. */
import type { JSX } from "preact";
import type { ColumnGroup, Head } from "../data";
import { useWords } from "../parts/language";
import { changed, go, type Route } from "../parts/router";
import { SortableTable, type TableColumn } from "../parts/sortable-table";
import { isNumber, keyOf, useModel } from "./model";
import { PlaceLink } from "./place-link";
import { RoleChips } from "./role-chips";

interface HeadsTableProps {
  route: Route;
  heads: Head[];
  marks: Set<string>;
  groups: ColumnGroup[];
}

export function HeadsTable({ route, heads, marks, groups }: HeadsTableProps): JSX.Element {
  const model = useModel();
  const { say, text, number } = useWords();
  const there = groups.filter((group) => model.page.columns.some((column) => column.group === group));
  const chosen = there.find((group) => group === route.query.group) ?? there[0];

  const columns: TableColumn<Head>[] = [
    {
      name: "head",
      label: say("head"),
      by: (head) => head.site * 10_000 + head.head,
      show: (head) => <PlaceLink place={[head.site, head.head]} />,
    },
    {
      name: "roles",
      label: say("roles"),
      by: (head) =>
        model
          .held(head)
          .map((score) => score.role)
          .join(" "),
      show: (head) => <RoleChips head={head} />,
    },
    ...model.page.columns
      .filter((column) => column.group === chosen)
      .map((column): TableColumn<Head> => {
        const [low, high] = model.range(column);
        return {
          name: column.name,
          label: text(column.label),
          about: text(column.about),
          numeric: true,
          by: (head) => head.values[column.name] ?? null,
          show: (head) => number(head.values[column.name], column.format),
          bar: (head) => {
            const value = head.values[column.name];
            return isNumber(value) && low >= 0 && high > low ? (value - low) / (high - low) : null;
          },
        };
      }),
  ];
  return (
    <>
      <div class="segments" role="group" aria-label={say("whichNumbers")}>
        {there.map((group) => (
          <button
            type="button"
            aria-pressed={group === chosen}
            onClick={() => go(changed(route, { group, sort: null, order: null }), true)}
          >
            {say(`group_${group}`)}
          </button>
        ))}
      </div>
      <SortableTable
        label={say("headsTable")}
        columns={columns}
        rows={heads}
        keyOf={(head) => keyOf([head.site, head.head])}
        marked={(head) => marks.has(keyOf([head.site, head.head]))}
        sorting={{ column: route.query.sort ?? "head", down: route.query.order === "down" }}
        onSort={({ column, down }) => go(changed(route, { sort: column, order: down ? "down" : "up" }), true)}
      />
    </>
  );
}
