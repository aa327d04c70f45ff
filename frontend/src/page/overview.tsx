/** Every head at once: layers by heads, coloured by any number or by role, and the table of them all. */
import type { JSX } from "preact";
import { useCallback, useMemo, useRef } from "preact/hooks";
import type { ColumnGroup } from "../data";
import { KindLegend, RampLegend, type Kind } from "../parts/legend";
import { useWords } from "../parts/language";
import { changed, go, hrefOf, type Route } from "../parts/router";
import { useDark } from "../parts/theme";
import { FindingList } from "./findings";
import { Glance } from "./glance";
import { HeadsTable } from "./heads-table";
import { markedIn, useModel, withUnit } from "./model";
import { Peek } from "./peek";
import { gridWidth, StackGrid } from "./stack-grid";

const GROUPS: ColumnGroup[] = ["looks", "writes", "matters", "other"];
const FINDINGS = 4;
const PICTURES = 400;
/** Colours that are no column. */
export const BY_ROLE = "role";
export const BY_MAP = "map";

export function Overview({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const { page } = model;
  const words = useWords();
  const { say, text } = words;
  const dark = useDark();
  const point = useRef<((key: string) => void) | null>(null);
  const onPoint = useCallback((key: string | null) => void (key && point.current?.(key)), []);

  // A picture says more of a head without a role than an empty square; a thousand pictures are slow to draw unasked.
  const pictures = Object.keys(page.maps).length > 0 && page.heads.length <= PICTURES;
  const asked = route.query.color ?? (pictures ? BY_MAP : BY_ROLE);
  const column = model.column(asked);
  const color = column || asked === BY_MAP ? asked : BY_ROLE;
  const role = model.role(route.query.role ?? "") ? (route.query.role as string) : "";
  const marks = useMemo(() => markedIn(route.query.mark), [route.query.mark]);
  const here = { ...route, path: ["overview"] };
  const set = (query: Record<string, string | null>) => go(changed(here, query), true);

  const holding = page.heads.filter((head) => !role || head.roles.some((score) => score.role === role && score.holds));
  const kinds: Kind[] = page.roles
    .map((one) => ({
      key: one.name,
      letters: one.letters,
      label: text(one.label),
      about: text(one.about),
      colour: model.roleColour(one.name, dark),
      count: page.heads.filter((head) => head.roles.some((score) => score.role === one.name && score.holds)).length,
    }))
    .filter((kind) => kind.count > 0 || kind.key === role);
  const roleAbout = model.role(role);

  return (
    <>
      <Glance />

      <section class="headline" aria-labelledby="headline">
        <h2 id="headline">{say("whatWasFound")}</h2>
        {page.findings.length ? <FindingList findings={page.findings.slice(0, FINDINGS)} /> : null}
        {page.findings.length > FINDINGS ? (
          <a href={hrefOf(["findings"])}>{say("allFindings", { count: page.findings.length })}</a>
        ) : null}
      </section>

      <section aria-labelledby="every-head">
        <h2 id="every-head">{say("everyHead")}</h2>
        <p class="lead">{say("everyHeadAbout")}</p>
        <div class="controls">
          <label>
            {say("colourBy")}
            <select value={color} onChange={(event) => set({ color: event.currentTarget.value, mark: null })}>
              <option value={BY_ROLE}>{say("byRole")}</option>
              {Object.keys(page.maps).length ? <option value={BY_MAP}>{say("byMap")}</option> : null}
              {GROUPS.map((group) => {
                const columns = page.columns.filter((one) => one.group === group);
                return columns.length ? (
                  <optgroup label={say(`group_${group}`)}>
                    {columns.map((one) => (
                      <option value={one.name}>{text(one.label)}</option>
                    ))}
                  </optgroup>
                ) : null;
              })}
            </select>
          </label>
          <label>
            {say("onlyRole")}
            <select value={role} onChange={(event) => set({ role: event.currentTarget.value })}>
              <option value="">{say("anyRole")}</option>
              {kinds.map((kind) => (
                <option value={kind.key}>{`${kind.label} (${kind.count})`}</option>
              ))}
            </select>
          </label>
          <span class="muted" role="status">
            {say("shownHeads", { shown: holding.length, all: page.heads.length })}
          </span>
        </div>
        <div class="explained">
          {column ? (
            <>
              <p>
                <strong>{text(column.label)}</strong> {text(column.about)}
              </p>
              <RampLegend scale={model.scale(column, dark)} format={(value) => withUnit(value, column.format, words)} />
            </>
          ) : (
            <p>{color === BY_MAP ? say("byMapAbout") : roleAbout ? text(roleAbout.about) : say("byRoleAbout")}</p>
          )}
        </div>
        <KindLegend label={say("roles")} kinds={kinds} chosen={role} onChoose={(key) => set({ role: key })} />
        <div class="grid-and-peek">
          <div class="stacks" style={{ flexBasis: gridWidth(Math.max(...page.sites.map((site) => site.heads))) }}>
            {page.stacks.map((stack, i) => (
              <StackGrid key={i} stack={stack} color={color} role={role} marks={marks} onPoint={onPoint} />
            ))}
          </div>
          <Peek point={point} column={column} />
        </div>
      </section>

      <section aria-labelledby="heads-table">
        <h2 id="heads-table">{say("headsTable")}</h2>
        <HeadsTable route={here} heads={holding} marks={marks} groups={GROUPS} />
      </section>
    </>
  );
}
