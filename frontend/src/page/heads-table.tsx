/** Sortable table of all heads. */
import type { JSX } from "preact";
import type { Head } from "../data";
import { Segments } from "../parts/controls";
import { CsvButton } from "../parts/figure";
import { useLocale } from "../parts/language";
import { replaceQuery, type Route } from "../parts/router";
import { numberColumn, SortableTable, type TableColumn } from "../parts/sortable-table";
import { GROUPS } from "./column-name";
import { headColumn } from "./head-link";
import { headsCsv } from "./heads-csv";
import { idOf, isNumber, keyOf, useModel } from "./model";
import { rolesColumn } from "./role-chips";

interface HeadsTableProps {
  route: Route;
  heads: Head[];
  marks: Set<string>;
}

export function HeadsTable({ route, heads, marks }: HeadsTableProps): JSX.Element {
  const model = useModel();
  const { t, text, number } = useLocale();
  const available = GROUPS.filter((group) => model.page.columns.some((column) => column.group === group));
  const chosen = available.find((group) => group === route.query.group) ?? available[0];
  const statistics = model.page.columns.filter((column) => column.group === chosen);
  const columns: TableColumn<Head>[] = [
    headColumn("head", t("head"), idOf),
    rolesColumn(model, t("roles")),
    ...statistics.map((column): TableColumn<Head> => {
      const [low, high] = model.range(column);
      const valueOf = (head: Head) => model.value(head, column.name);
      const share = (value: number | null | undefined) =>
        isNumber(value) && low >= 0 && high > low ? (value - low) / (high - low) : null;
      return {
        ...numberColumn(column.name, text(column.label), valueOf, (value) => number(value, column.format)),
        code: column.name,
        about: text(column.about),
        bar: (head) => share(valueOf(head)),
      };
    }),
  ];
  return (
    <>
      <div class="table-head">
        <Segments
          label={t("whichNumbers")}
          options={available.map((group) => [group, t(`group_${group}`)])}
          value={chosen}
          onChange={(group) => replaceQuery(route, { group, sort: null })}
        />
        <span class="save">
          <CsvButton
            title={t("allColumns")}
            name="heads"
            csv={() => headsCsv(model, heads, Object.keys(model.page.table))}
          />
        </span>
      </div>
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
