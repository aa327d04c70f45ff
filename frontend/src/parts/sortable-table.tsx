/** A table that can be sorted by each of its columns; the order is part of the link. */
import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { CodeName } from "./code-name";
import { TableRegion } from "./controls";
import { useLocale } from "./language";
import { replaceQuery, type Route } from "./router";

export interface TableColumn<Row> {
  name: string;
  label: string;
  /** Its name in files and on the command line. */
  code?: string;
  about?: string;
  numeric?: boolean;
  /** The sort key; null sorts last. */
  by: (row: Row) => number | string | null;
  show: (row: Row) => ComponentChildren;
  /** The length of a bar behind the number, from 0 to 1. */
  bar?: (row: Row) => number | null;
}

/** A column of numbers. */
export function numberColumn<Row>(
  name: string,
  label: string,
  by: (row: Row) => number | null | undefined,
  format: (value: number | null | undefined, row: Row) => ComponentChildren,
): TableColumn<Row> {
  return { name, label, numeric: true, by: (row) => by(row) ?? null, show: (row) => format(by(row), row) };
}

interface SortableTableProps<Row> {
  label: string;
  columns: TableColumn<Row>[];
  rows: Row[];
  keyOf: (row: Row) => string;
  route: Route;
  /** Query parameter that holds the order. */
  parameter?: string;
  /** The initial order: `column-down` or `column-up`. */
  order: string;
  marked?: (row: Row) => boolean;
  /** Rows shown until all are requested. */
  first?: number;
}

function sorted<Row>(rows: Row[], column: TableColumn<Row> | undefined, down: boolean): Row[] {
  if (!column) return rows;
  const missing = (value: number | string | null) => value === null || value === "";
  return [...rows].sort((one, other) => {
    const [a, b] = [column.by(one), column.by(other)];
    if (missing(a) || missing(b)) return Number(missing(a)) - Number(missing(b));
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  });
}

// A table of fewer columns is not stretched to a wide screen.
const WIDE = 5;

export function SortableTable<Row>(props: SortableTableProps<Row>): JSX.Element {
  const { t } = useLocale();
  const [all, setAll] = useState(false);
  const { route, columns, parameter = "sort", first = 40 } = props;
  const [sortedBy, direction] = (route.query[parameter] ?? props.order).split("-");
  const down = direction === "down";
  const rows = sorted(
    props.rows,
    columns.find((column) => column.name === sortedBy),
    down,
  );
  const shown = all ? rows : rows.slice(0, first);
  const sortBy = ({ name, numeric }: TableColumn<Row>) => {
    const next = name === sortedBy ? !down : Boolean(numeric);
    replaceQuery(route, { [parameter]: `${name}-${next ? "down" : "up"}` });
  };
  return (
    <>
      <TableRegion label={props.label}>
        <table class={`sortable${columns.length > WIDE ? " full" : ""}`}>
          <caption class="offstage">{props.label}</caption>
          <thead>
            <tr>
              {columns.map((column) => (
                <th
                  scope="col"
                  key={column.name}
                  class={column.numeric ? "numeric" : ""}
                  aria-sort={sortedBy === column.name ? (down ? "descending" : "ascending") : "none"}
                >
                  <button type="button" title={column.about} onClick={() => sortBy(column)}>
                    <CodeName label={column.label} name={column.code ?? column.label}>
                      <span class="sort-mark" aria-hidden="true" />
                    </CodeName>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={props.keyOf(row)} class={props.marked?.(row) ? "marked" : ""}>
                {columns.map((column, i) => (
                  <Cell column={column} row={row} heading={i === 0} />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </TableRegion>
      {rows.length > shown.length ? (
        <button type="button" class="more" onClick={() => setAll(true)}>
          {t("showAll", { count: rows.length })}
        </button>
      ) : null}
    </>
  );
}

function Cell<Row>({ column, row, heading }: { column: TableColumn<Row>; row: Row; heading: boolean }): JSX.Element {
  if (heading) return <th scope="row">{column.show(row)}</th>;
  const share = column.bar?.(row);
  const width = share === null || share === undefined ? null : `${Math.round(100 * Math.min(1, Math.max(0, share)))}%`;
  const style = width ? { backgroundSize: `${width} 100%` } : {};
  return (
    <td class={`${column.numeric ? "numeric" : ""}${width ? " bar" : ""}`} style={style}>
      {column.show(row)}
    </td>
  );
}
