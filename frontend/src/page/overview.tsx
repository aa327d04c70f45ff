/** Overview: summary, findings, the grid of all heads coloured by a statistic or by role, and the table of heads. */
import type { JSX } from "preact";
import { useCallback, useMemo, useRef } from "preact/hooks";
import { withCodeName } from "../parts/code-name";
import { roleColour } from "../parts/colour";
import { Select } from "../parts/controls";
import { useLocale } from "../parts/language";
import { CategoryLegend, type Category } from "../parts/legend";
import { hrefOf, replaceQuery, type Query, type Route } from "../parts/router";
import { useDark } from "../parts/theme";
import { ColumnExplained, ColumnOptions } from "./column-name";
import { FindingList } from "./findings";
import { HeadsTable } from "./heads-table";
import { markedIn, useModel } from "./model";
import { Preview } from "./preview";
import { BY_MAP, BY_ROLE, StackGrids } from "./stack-grid";
import { Summary } from "./summary";

const FINDINGS = 4;
const MAX_MAPS = 400; // heads up to which maps are shown by default: more are slow to draw

export function Overview({ route: { query } }: { route: Route }): JSX.Element {
  const model = useModel();
  const { page } = model;
  const { t, text } = useLocale();
  const dark = useDark();
  const hover = useRef<((key: string) => void) | null>(null);
  const onHover = useCallback((key: string | null) => void (key && hover.current?.(key)), []);

  const hasMaps = Object.keys(page.maps).length > 0;
  const requested = query.color ?? (hasMaps && page.heads.length <= MAX_MAPS ? BY_MAP : BY_ROLE);
  const column = model.column(requested);
  const color = column || requested === BY_MAP ? requested : BY_ROLE;
  const role = model.role(query.role ?? "");
  const marks = useMemo(() => markedIn(query.mark), [query.mark]);
  const route = { path: ["overview"], query };
  const set = (changes: Query) => replaceQuery(route, changes);

  const heads = role ? page.heads.filter((head) => model.hasRole(head, role.name)) : page.heads;
  const categories: Category[] = page.roles
    .map((one) => ({
      key: one.name,
      letters: one.letters,
      label: text(one.label),
      about: text(one.about),
      colour: roleColour(one.name, dark),
      count: page.heads.filter((head) => model.hasRole(head, one.name)).length,
    }))
    .filter((category) => category.count > 0 || category.key === role?.name);

  return (
    <>
      <Summary />

      <section class="headline" aria-labelledby="headline">
        <h2 id="headline">{t("findings")}</h2>
        {page.findings.length ? <FindingList findings={page.findings.slice(0, FINDINGS)} /> : null}
        {page.findings.length > FINDINGS ? (
          <a href={hrefOf(["findings"])}>{t("allFindings", { count: page.findings.length })}</a>
        ) : null}
      </section>

      <section aria-labelledby="every-head">
        <h2 id="every-head">{t("allHeads")}</h2>
        <p class="lead">{t("allHeadsAbout")}</p>
        <div class="controls">
          <Select label={t("colourBy")} value={color} onChange={(value) => set({ color: value, mark: null })}>
            <option value={BY_ROLE}>{t("byRole")}</option>
            {hasMaps ? <option value={BY_MAP}>{t("byMap")}</option> : null}
            <ColumnOptions />
          </Select>
          <Select label={t("onlyRole")} value={role?.name ?? ""} onChange={(value) => set({ role: value })}>
            <option value="">{t("anyRole")}</option>
            {categories.map((category) => (
              <option value={category.key}>{`${withCodeName(category.label, category.key)} (${category.count})`}</option>
            ))}
          </Select>
          <span class="muted" role="status">
            {t("shownHeads", { shown: heads.length, all: page.heads.length })}
          </span>
        </div>
        {column ? (
          <ColumnExplained column={column} />
        ) : (
          <p class="explained">{color === BY_MAP ? t("byMapAbout") : role ? text(role.about) : t("byRoleAbout")}</p>
        )}
        <CategoryLegend
          label={t("roles")}
          categories={categories}
          chosen={role?.name ?? ""}
          onChoose={(key) => set({ role: key })}
        />
        <div class="grid-and-preview">
          <StackGrids color={color} role={role?.name ?? ""} marks={marks} onHover={onHover} />
          <Preview hover={hover} column={column} />
        </div>
      </section>

      <section aria-labelledby="heads-table">
        <h2 id="heads-table">{t("headsTable")}</h2>
        <HeadsTable route={route} heads={heads} marks={marks} />
      </section>
    </>
  );
}
