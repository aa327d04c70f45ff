/** The grid of one stack of layers. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { part, unpack, type Head, type Place, type Stack } from "../data";
import { NOTHING, scaleOf, type Scale } from "../parts/colour";
import { Figure } from "../parts/figure";
import { gridSvg } from "../parts/grid-svg";
import { HeadGrid, type GridCell, type GridRow } from "../parts/head-grid";
import type { Heat } from "../parts/heat-map";
import { useWords, type Words } from "../parts/language";
import { useDark } from "../parts/theme";
import { headHref, keyOf, useModel, withUnit, type Model } from "./model";

// The side of a cell, in the size of a letter.
const LARGEST = 5;

/** As wide as cells of that size make a grid. */
export function gridWidth(columns: number): string {
  return `${Math.max(16, LARGEST * columns + 2.2)}rem`;
}

interface StackGridProps {
  stack: Stack;
  /** A column, "role" or "map". */
  color: string;
  /** Only heads that have it are lit; empty for all. */
  role: string;
  marks: Set<string>;
  onPoint: (key: string | null) => void;
}

/** A head's block map, with its scale: small shares are seen better under a square root. */
export function mapOf(model: Model, [site, head]: Place, dark: boolean): { heat: Heat; scale: Scale } | null {
  const packed = model.page.maps[String(site)];
  if (!packed) return null;
  const map = part(unpack(packed), head);
  const [rows = 0, columns = 0] = map.shape;
  const largest = packed.scale?.[head] ?? map.values.reduce((most, x) => Math.max(most, x), 0);
  return { heat: { rows, columns, values: map.values }, scale: scaleOf(0, largest || 1, dark, 0.5) };
}

function cellOf(model: Model, head: Head, props: StackGridProps, words: Words, dark: boolean): GridCell {
  const { color, role, marks } = props;
  const place: Place = [head.site, head.head];
  const column = model.column(color);
  const held = model.held(head);
  const main = held.find((score) => score.role === role) ?? held[0];
  const roles = held.map((score) => words.text(model.role(score.role)?.label ?? { en: score.role, zh: score.role }));
  const value = column ? `${words.text(column.label)} ${withUnit(head.values[column.name], column.format, words)}` : "";
  const colour = column
    ? model.scale(column, dark).of(head.values[column.name])
    : main && color !== "map"
      ? model.roleColour(main.role, dark)
      : NOTHING[dark ? "dark" : "light"];
  const picture = color === "map" ? mapOf(model, place, dark) : null;
  return {
    key: keyOf(place),
    href: headHref(place),
    name: [model.long(place, words), value, roles.length ? words.list(roles) : words.say("noRole")]
      .filter(Boolean)
      .join(", "),
    colour,
    letters: main ? (model.role(main.role)?.letters ?? "") : "",
    faded: role !== "" && main?.role !== role,
    marked: marks.has(keyOf(place)),
    ...(picture ? { picture } : {}),
    ...(main ? { badge: model.roleColour(main.role, dark) } : {}),
  };
}

export function StackGrid(props: StackGridProps): JSX.Element {
  const model = useModel();
  const words = useWords();
  const dark = useDark();
  const { stack, color, role, marks, onPoint } = props;
  const { page } = model;
  const most = Math.max(0, ...stack.sites.map((site) => page.sites[site]?.heads ?? 0));
  const columns = Array.from({ length: most }, (_, head) => String(head));
  const rows = useMemo<GridRow[]>(
    () =>
      stack.sites.map((site) => ({
        label: String(page.sites[site]?.layer ?? site),
        name: words.say("layerName", { layer: page.sites[site]?.layer ?? site }),
        cells: columns.map((_, number) => {
          const head = model.head([site, number]);
          return head ? cellOf(model, head, props, words, dark) : null;
        }),
      })),
    [model, words, dark, stack, color, role, marks],
  );
  const column = model.column(color);
  const coloured = column ? words.text(column.label) : words.say(color === "map" ? "byMap" : "byRole");
  const title = page.stacks.length > 1 ? words.text(stack.label) : words.say("gridTitle");
  const legend = column
    ? `${coloured}: ${model
        .range(column)
        .map((x) => withUnit(x, column.format, words))
        .join(" – ")}`
    : coloured;
  const name = words.say("gridName", { stack: title, coloured });
  return (
    <Figure
      title={title}
      name={`heads-${color}`}
      fileTitle={`${title}: ${coloured}. ${page.facts.model}`}
      maxWidth={gridWidth(columns.length)}
      draw={() => gridSvg({ legend, columns, rows })}
    >
      <HeadGrid
        label={name}
        corner={words.say("gridCorner")}
        columns={columns}
        columnName={(head) => words.say("headName", { head })}
        rows={rows}
        onPoint={onPoint}
      />
    </Figure>
  );
}
