/** Grid of heads, one row per layer: arrow keys move, Enter opens. */
import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { textColourOn, type Scale } from "./colour";
import { HeatMap, type Heat } from "./heat-map";

export interface GridCell {
  key: string;
  href: string;
  /** Head, value and role in words. */
  name: string;
  colour: string;
  letters: string;
  faded: boolean;
  marked: boolean;
  picture?: { heat: Heat; scale: Scale };
  /** Background of the letters over a picture. */
  badge?: string;
  /** Crossed out. */
  ablated?: boolean;
  /** Without a value: struck through, so that it is not mistaken for a small one. */
  missing?: boolean;
}

export interface GridRow {
  label: string;
  name: string;
  cells: (GridCell | null)[];
}

interface HeadGridProps {
  label: string;
  corner: string;
  columns: string[];
  columnName: (label: string) => string;
  rows: GridRow[];
  /** Smallest width of a cell, in rem; a narrower grid scrolls. */
  minCell?: number;
  onHover?: (key: string | null) => void;
  /** Called instead of following the link of a cell. */
  onPick?: (key: string) => void;
}

const STEPS: Record<string, [down: number, right: number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

function classOf({ faded, marked, ablated, missing }: GridCell): string {
  const classes = { faded, marked, ablated, missing: missing && !faded };
  return ["cell", ...Object.entries(classes).flatMap(([name, isSo]) => (isSo ? [name] : []))].join(" ");
}

function Letters({ cell }: { cell: GridCell }): JSX.Element | null {
  if (!cell.letters) return null;
  const background = cell.picture ? cell.badge : undefined;
  if (!background) return <span>{cell.letters}</span>;
  return (
    <span class="badge" style={{ background, color: textColourOn(background) }}>
      {cell.letters}
    </span>
  );
}

export function HeadGrid(props: HeadGridProps): JSX.Element {
  const { label, corner, columns, columnName, rows, minCell = 1.5, onHover, onPick } = props;
  const table = useRef<HTMLTableElement>(null);
  const [[focusRow, focusColumn], setFocus] = useState<[number, number]>([0, 0]);

  const linkAt = (row: number, column: number) =>
    table.current?.querySelector<HTMLAnchorElement>(`a[data-row="${row}"][data-column="${column}"]`);

  const moveFocus = (event: KeyboardEvent, row: number, column: number) => {
    let link: HTMLAnchorElement | null | undefined = null;
    const step = STEPS[event.key];
    if (step) {
      // Skip heads that a layer does not have.
      for (let n = 1; !link && n <= rows.length + columns.length; n++) {
        link = linkAt(row + n * step[0], column + n * step[1]);
      }
    } else if (event.key === "Home") {
      link = linkAt(event.ctrlKey ? 0 : row, 0);
    } else if (event.key === "End") {
      const last = event.ctrlKey ? rows.length - 1 : row;
      link = linkAt(last, (rows[last]?.cells.length ?? 1) - 1);
    } else return;
    event.preventDefault();
    link?.focus();
  };

  const pick = (event: Event, key: string) => {
    event.preventDefault();
    event.stopPropagation();
    onPick?.(key);
  };
  return (
    <div class="grid-scroll">
      <table
        class="head-grid"
        role="grid"
        aria-label={label}
        ref={table}
        style={{ minWidth: `${minCell * columns.length + 2}rem`, "--columns": String(columns.length) }}
        onMouseLeave={() => onHover?.(null)}
      >
        <thead>
          <tr>
            <th scope="col" class="corner">
              {corner}
            </th>
            {columns.map((column) => (
              <th scope="col" aria-label={columnName(column)}>
                {column}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, i) => (
            <tr key={row.label}>
              <th scope="row" aria-label={row.name}>
                {row.label}
              </th>
              {row.cells.map((cell, j) => (
                <td role="gridcell" key={cell?.key ?? j}>
                  {cell ? (
                    <a
                      href={cell.href}
                      class={classOf(cell)}
                      aria-label={cell.name}
                      data-row={i}
                      data-column={j}
                      data-key={cell.key}
                      tabIndex={i === focusRow && j === focusColumn ? 0 : -1}
                      style={cell.faded ? {} : { backgroundColor: cell.colour, color: textColourOn(cell.colour) }}
                      onKeyDown={(event) => moveFocus(event, i, j)}
                      onClick={onPick && ((event) => pick(event, cell.key))}
                      onFocus={() => {
                        setFocus([i, j]);
                        onHover?.(cell.key);
                      }}
                      onMouseEnter={() => onHover?.(cell.key)}
                    >
                      {cell.picture && !cell.faded ? (
                        <HeatMap {...cell.picture.heat} scale={cell.picture.scale} label="" />
                      ) : null}
                      <Letters cell={cell} />
                    </a>
                  ) : null}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
