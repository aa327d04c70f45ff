/** Sortable table of all heads. */
import type { JSX } from "preact";
import type { ColumnGroup, Head } from "../data";
import { Segments } from "../parts/controls";
import { useLocale } from "../parts/language";
import { replaceQuery, type Route } from "../parts/router";
import { numberColumn, SortableTable, type TableColumn } from "../parts/sortable-table";
import { headColumn } from "./head-link";
import { idOf, isNumber, keyOf, useModel } from "./model";
import { rolesColumn } from "./role-chips";

interface HeadsTableProps {
  route: Route;
  heads: Head[];
  marks: Set<string>;
  groups: ColumnGroup[];
}

export function HeadsTable({ route, heads, marks, groups }: HeadsTableProps): JSX.Element {
  const model = useModel();
  const { t, text, number } = useLocale();
  const available = groups.filter((group) => model.page.columns.some((column) => column.group === group));
  const chosen = available.find((group) => group === route.query.group) ?? available[0];
  const statistics = model.page.columns.filter((column) => column.group === chosen);
  const columns: TableColumn<Head>[] = [
    headColumn("head", t("head"), idOf),
    rolesColumn(model, t("roles")),
    ...statistics.map((column): TableColumn<Head> => {
      const [low, high] = model.range(column);
      const valueOf = (head: Head) => head.values[column.name];
      const share = (value: number | null | undefined) =>
        isNumber(value) && low >= 0 && high > low ? (value - low) / (high - low) : null;
      return {
        ...numberColumn(column.name, text(column.label), valueOf, (value) => number(value, column.format)),
        about: text(column.about),
        bar: (head) => share(valueOf(head)),
      };
    }),
  ];
  return (
    <>
      <Segments
        label={t("whichNumbers")}
        options={available.map((group) => [group, t(`group_${group}`)])}
        value={chosen}
        onChange={(group) => replaceQuery(route, { group, sort: null })}
      />
      <SortableTable
        label={t("headsTable")}
        columns={columns}
        rows={heads}
        keyOf={(head) => keyOf(idOf(head))}
        marked={(head) => marks.has(keyOf(idOf(head)))}
        route={route}
        order="head-up"
      />
    </>
  );
}
