/** Columns of the table by label, and by their names in heads.parquet and on the command line. */
import type { JSX } from "preact";
import type { Column, ColumnGroup } from "../data";
import { CodeName, withCodeName } from "../parts/code-name";
import { useLocale, type Locale, type StringName } from "../parts/language";
import { RampLegend } from "../parts/legend";
import { useDark } from "../parts/theme";
import { useModel, withUnit } from "./model";

/** The groups of statistics; companions of other columns come last. */
export const STATISTICS: ColumnGroup[] = ["attention", "output", "importance", "other"];
export const GROUPS: ColumnGroup[] = [...STATISTICS, "companion"];

export function ColumnName({ column }: { column: Column }): JSX.Element {
  const { text } = useLocale();
  return <CodeName label={text(column.label)} name={column.name} />;
}

const UNITS: Record<string, StringName> = { nats: "unitNats", tokens: "unitTokens" };

/** The label of an axis, with its unit. */
export function axisLabel(column: Column, { text, t }: Locale): string {
  const label = text(column.label);
  const name = UNITS[column.format];
  const unit = name && t(name);
  return unit && !label.includes(unit) ? t("labelWithUnit", { label, unit }) : label;
}

/** The colour scale of a column. */
export function ColumnRamp({ column }: { column: Column }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const dark = useDark();
  const missing = model.page.heads.some((head) => model.value(head, column.name) === null);
  return (
    <RampLegend
      scale={model.scale(column, dark)}
      format={(value) => withUnit(value, column.format, locale)}
      {...(missing ? { missing: locale.t("notComputed") } : {})}
    />
  );
}

/** The meaning of a column and its colour scale. */
export function ColumnExplained({ column }: { column: Column }): JSX.Element {
  const { text } = useLocale();
  return (
    <div class="explained">
      <p>
        <strong>
          <ColumnName column={column} />
        </strong>{" "}
        {text(column.about)}
      </p>
      <ColumnRamp column={column} />
    </div>
  );
}

/** The options of a choice of columns, by group. */
export function ColumnOptions(): JSX.Element {
  const { page } = useModel();
  const { t, text } = useLocale();
  return (
    <>
      {GROUPS.map((group) => {
        const columns = page.columns.filter((one) => one.group === group);
        return columns.length ? (
          <optgroup label={t(`group_${group}`)}>
            {columns.map((one) => (
              <option value={one.name}>{withCodeName(text(one.label), one.name)}</option>
            ))}
          </optgroup>
        ) : null;
      })}
    </>
  );
}
