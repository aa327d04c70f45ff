/** A table whose columns sort it. */
import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { useWords } from "./language";

export interface TableColumn<Row> {
  name: string;
  label: string;
  about?: string;
  numeric?: boolean;
  /** What rows are sorted by; nothing sorts last. */
  by: (row: Row) => number | string | null;
  show: (row: Row) => ComponentChildren;
  /** The share of a bar behind the number. */
  bar?: (row: Row) => number | null;
}

export interface Sorting {
  column: string;
  down: boolean;
}

interface SortableTableProps<Row> {
  label: string;
  columns: TableColumn<Row>[];
  rows: Row[];
  keyOf: (row: Row) => string;
  sorting: Sorting;
  onSort: (sorting: Sorting) => void;
  marked?: (row: Row) => boolean;
  /** How many rows are shown before the reader asks for all. */
  first?: number;
}

export function sorted<Row>(rows: Row[], column: TableColumn<Row> | undefined, down: boolean): Row[] {
  if (!column) return rows;
  const missing = (value: number | string | null) => value === null || value === "";
  return [...rows].sort((one, other) => {
    const [a, b] = [column.by(one), column.by(other)];
    if (missing(a) || missing(b)) return Number(missing(a)) - Number(missing(b));
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  });
}

// Few columns across a wide screen would be too far apart to be read as rows.
const WIDE = 5;

export function SortableTable<Row>(props: SortableTableProps<Row>): JSX.Element {
  const { say } = useWords();
  const [all, setAll] = useState(false);
  const { sorting, first = 40 } = props;
  const rows = sorted(
    props.rows,
    props.columns.find((column) => column.name === sorting.column),
    sorting.down,
  );
  const shown = all ? rows : rows.slice(0, first);
  const direction = sorting.down ? "descending" : "ascending";
  return (
    <>
      <div class="table-scroll" tabIndex={0} role="region" aria-label={props.label}>
        <table class={`sortable${props.columns.length > WIDE ? " full" : ""}`}>
          <caption class="unseen-caption">{props.label}</caption>
          <thead>
            <tr>
              {props.columns.map((column) => (
                <th
                  scope="col"
                  key={column.name}
                  class={column.numeric ? "numeric" : ""}
                  aria-sort={sorting.column === column.name ? direction : "none"}
                >
                  <button
                    type="button"
                    title={column.about}
                    onClick={() =>
                      props.onSort({
                        column: column.name,
                        down: sorting.column === column.name ? !sorting.down : Boolean(column.numeric),
                      })
                    }
                  >
                    {column.label}
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={props.keyOf(row)} class={props.marked?.(row) ? "marked" : ""}>
                {props.columns.map((column, i) => (
                  <Cell column={column} row={row} heading={i === 0} />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > shown.length ? (
        <button type="button" class="more" onClick={() => setAll(true)}>
          {say("showAll", { count: rows.length })}
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
