/** Grid of the heads of one stack of layers. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { hasNaN, part, unpack, type Head, type HeadId, type Stack } from "../data";
import { noValue, roleColour, scaleOf, type Scale } from "../parts/colour";
import { Figure } from "../parts/figure";
import { gridSvg } from "../parts/grid-svg";
import { HeadGrid, type GridCell, type GridRow } from "../parts/head-grid";
import type { Heat } from "../parts/heat-map";
import { useLocale } from "../parts/language";
import { useDark } from "../parts/theme";
import { axisLabel } from "./column-name";
import { headsCsv } from "./heads-csv";
import { headHref, idOf, keyOf, useModel, withUnit, type Model } from "./model";

const MAX_CELL = 5; // side of a cell, in rem
/** Colourings that are no column. */
export const BY_ROLE = "role";
export const BY_MAP = "map";

/** The width of a grid of cells of the maximum size. */
function gridWidth(columns: number): string {
  return `${Math.max(16, MAX_CELL * columns + 2.2)}rem`;
}

/** The attention map of a head, with a square-root scale that shows small weights. */
export function mapOf(model: Model, [site, head]: HeadId, dark: boolean): { heat: Heat; scale: Scale } | null {
  const packed = model.page.maps[String(site)];
  if (!packed) return null;
  const map = part(unpack(packed), head);
  const [rows = 0, columns = 0] = map.shape;
  const largest = packed.scale?.[head] ?? map.values.reduce((most, x) => Math.max(most, x), 0);
  return { heat: { rows, columns, values: map.values }, scale: scaleOf(0, largest || 1, dark, 0.5) };
}

interface StackGridsProps {
  /** A column, "role" or "map". */
  color: string;
  /** Other heads are faded; empty for all. */
  role?: string;
  marks?: Set<string>;
  /** What is written into the cells; the letters of roles by default. */
  letters?: "roles" | "numbers" | "none";
  onHover?: (key: string | null) => void;
}

const NO_MARKS = new Set<string>();

/** The grids of all stacks. */
export function StackGrids(props: StackGridsProps): JSX.Element {
  const { sites, stacks } = useModel().page;
  const width = gridWidth(Math.max(...sites.map((site) => site.heads)));
  return (
    <div class="stacks" style={{ flexBasis: width, maxWidth: width }}>
      {stacks.map((stack, i) => (
        <StackGrid key={i} stack={stack} {...props} />
      ))}
    </div>
  );
}

function StackGrid(props: StackGridsProps & { stack: Stack }): JSX.Element {
  const { stack, color, role = "", marks = NO_MARKS, letters = "roles", onHover } = props;
  const model = useModel();
  const locale = useLocale();
  const { t, text } = locale;
  const dark = useDark();
  const { page } = model;
  const column = model.column(color);
  const most = Math.max(0, ...stack.sites.map((site) => page.sites[site]?.heads ?? 0));
  const columns = Array.from({ length: most }, (_, head) => String(head));

  const rows = useMemo<GridRow[]>(() => {
    const scale = column && model.scale(column, dark);
    const cellOf = (head: Head): GridCell => {
      const roles = model.rolesOf(head);
      const main = roles.find((score) => score.role === role) ?? roles[0];
      const badge = main && roleColour(main.role, dark);
      const picture = color === BY_MAP ? mapOf(model, idOf(head), dark) : null;
      const value = column ? model.value(head, column.name) : null;
      const isNaN = picture !== null && hasNaN(picture.heat.values);
      const missing = (column !== undefined && value === null) || isNaN;
      const number = column && (missing ? t("notComputed") : withUnit(value, column.format, locale));
      const names = roles.map((score) => text(model.role(score.role)?.label ?? { en: score.role, zh: score.role }));
      const words = column ? `${text(column.label)} ${number}` : isNaN ? t("notANumber") : "";
      const short = column && !missing ? locale.short(value, column.format) : "";
      const inCell = { roles: main ? (model.role(main.role)?.letters ?? "") : "", numbers: short, none: "" };
      const described = [model.fullName(idOf(head), locale), words, names.length ? locale.list(names) : t("noRole")];
      return {
        key: keyOf(idOf(head)),
        href: headHref(idOf(head)),
        name: described.filter(Boolean).join(", "),
        colour: column && scale ? scale.of(value) : ((color === BY_ROLE && badge) || noValue(dark)),
        letters: inCell[letters],
        missing,
        faded: role !== "" && main?.role !== role,
        marked: marks.has(keyOf(idOf(head))),
        ...(picture && !isNaN ? { picture } : {}),
        ...(badge ? { badge } : {}),
      };
    };
    return stack.sites.map((site) => ({
      label: String(model.layer(site)),
      name: t("layerName", { layer: model.layer(site) }),
      cells: columns.map((_, number) => {
        const head = model.head([site, number]);
        return head ? cellOf(head) : null;
      }),
    }));
  }, [model, locale, dark, stack, color, role, marks, letters]);

  const coloured = column ? axisLabel(column, locale) : t(color === BY_MAP ? "byMap" : "byRole");
  const title = page.stacks.length > 1 ? text(stack.label) : column ? text(column.label) : t("gridTitle");
  const axes = { across: t("gridAcross"), down: t("gridCorner") };
  const cell = { width: letters === "numbers" ? 42 : 30, height: 30 };
  const ramp = column && {
    scale: model.scale(column, dark),
    format: (x: number) => locale.number(x, column.format), // the legend has the unit
    ...(rows.some((row) => row.cells.some((cell) => cell?.missing)) ? { missing: t("notComputed") } : {}),
  };
  const heads = page.heads.filter((head) => stack.sites.includes(head.site));
  return (
    <Figure
      title={title}
      name={`heads-${page.stacks.length > 1 ? `${page.stacks.indexOf(stack)}-` : ""}${color}`}
      fileTitle={`${page.stacks.length > 1 ? `${title}: ` : ""}${coloured}. ${page.facts.model}`}
      maxWidth={gridWidth(columns.length)}
      draw={() => gridSvg({ legend: coloured, columns, rows, axes, cell, ...(ramp ? { ramp } : {}) })}
      {...(column ? { csv: () => headsCsv(model, heads, [column.name]) } : {})}
    >
      <HeadGrid
        label={t("gridName", { stack: title, coloured })}
        corner={t("gridCorner")}
        columns={columns}
        columnName={(head) => t("headName", { head })}
        rows={rows}
        minCell={letters === "numbers" ? 2.6 : 1.5}
        {...(onHover ? { onHover } : {})}
      />
    </Figure>
  );
}
