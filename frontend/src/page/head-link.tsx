/** A link to the card of a head. */
import type { JSX } from "preact";
import type { HeadId } from "../data";
import { useLocale } from "../parts/language";
import type { TableColumn } from "../parts/sortable-table";
import { headHref, orderOf, useModel } from "./model";

export function HeadLink({ id }: { id: HeadId }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const origin = model.head(id)?.origin;
  return (
    <a href={headHref(id)} aria-label={model.fullName(id, locale)}>
      {model.shortName(id, locale)}
      {origin ? <span class="note"> {locale.text(origin)}</span> : null}
    </a>
  );
}

/** A column of links to heads. */
export function headColumn<Row>(name: string, label: string, id: (row: Row) => HeadId): TableColumn<Row> {
  return { name, label, by: (row) => orderOf(id(row)), show: (row) => <HeadLink id={id(row)} /> };
}
