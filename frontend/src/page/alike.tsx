/** Which heads are alike: every two heads of a layer, the groups that say the same, and pairs across layers. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Place } from "../data";
import { useWords } from "../parts/language";
import { changed, go, type Route } from "../parts/router";
import { SortableTable, type TableColumn } from "../parts/sortable-table";
import { Line } from "../parts/tokens";
import { EditsOfGroup, EditsOfModel } from "./edits";
import { LayerMatrices } from "./layer-matrices";
import { LikenessFigure } from "./likeness";
import { keyOf, markedIn, useModel } from "./model";
import { PlaceLink } from "./place-link";
import { mostAlike, pairsAcross, pairsOf, PREFERRED, type HeadPair } from "./relations";

const MOST_PAIRS = 200;

export function AlikeView({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const { page } = model;
  const words = useWords();
  const { say, text } = words;
  const names = page.relation_names;
  const relation =
    names.find((one) => one.name === route.query.relation) ?? names.find((one) => one.name === PREFERRED) ?? names[0];
  const marks = useMemo(() => markedIn(route.query.mark), [route.query.mark]);
  const here = { ...route, path: ["alike"] };
  const set = (query: Record<string, string | number | null>) => go(changed(here, query), true);

  return (
    <>
      <h2 tabIndex={-1}>{say("alike")}</h2>
      <p class="lead">
        <MostAlike /> {say("alikeAbout")}
      </p>
      <div class="two">
        <Groups marks={marks} />
        <LikenessFigure />
      </div>

      {relation ? (
        <section aria-labelledby="within-layers">
          <h2 id="within-layers">{say("withinLayers")}</h2>
          <div class="controls">
            <label>
              {say("relation")}
              <select value={relation.name} onChange={(event) => set({ relation: event.currentTarget.value })}>
                {names.map((one) => (
                  <option value={one.name}>{text(one.label)}</option>
                ))}
              </select>
            </label>
          </div>
          <p class="explained">{text(relation.about)}</p>
          <LayerMatrices relation={relation} marks={marks} />
          <PairTable
            label={say("mostAlike", { relation: text(relation.label) })}
            rows={pairsOf(model, relation.name).slice(0, MOST_PAIRS)}
            value={text(relation.label)}
            route={here}
            sortName="pairs"
            marks={marks}
          />
        </section>
      ) : null}

      <section aria-labelledby="across-layers">
        <h2 id="across-layers">{say("acrossLayers")}</h2>
        {page.pairs.length ? (
          <>
            <p class="explained">
              {say("acrossAbout")} {page.facts.pairs_by ? <Line text={text(page.facts.pairs_by)} /> : null}
            </p>
            <PairTable
              label={say("acrossLayers")}
              rows={pairsAcross(model)}
              value={say("cosine")}
              route={here}
              sortName="across"
              marks={marks}
            />
          </>
        ) : (
          <p class="muted">{say("noPairs")}</p>
        )}
      </section>
    </>
  );
}

/** The answer to the first question: which two are most alike of all. */
function MostAlike(): JSX.Element | null {
  const model = useModel();
  const words = useWords();
  const { say, number } = words;
  const best = mostAlike(model);
  if (!best) return null;
  return (
    <strong>
      {say("mostAlikeOfAll", {
        one: model.long(best.one, words),
        other: model.long(best.other, words),
        value: number(best.value),
      })}
    </strong>
  );
}

function Groups({ marks }: { marks: Set<string> }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const { say, number } = words;
  const { groups, likeness } = model.page;
  return (
    <section class="panel" aria-labelledby="groups">
      <h3 id="groups">{say("groups")}</h3>
      <p class="note">
        {likeness
          ? say("likenessAbout", { threshold: number(likeness.threshold), chance: number(likeness.null) })
          : say("noLikeness")}
      </p>
      {groups.length ? (
        <ul class="groups">
          {groups.map((group) => (
            <li
              key={group.heads.map(keyOf).join(" ")}
              class={group.heads.some((x) => marks.has(keyOf(x))) ? "marked" : ""}
            >
              {group.heads.map((place, i) => (
                <span key={keyOf(place)}>
                  {i ? " · " : ""}
                  <PlaceLink place={place} />
                </span>
              ))}
              <span class="muted"> {say("leastAlike", { cosine: number(group.least) })}</span>
              <EditsOfGroup group={group} />
            </li>
          ))}
        </ul>
      ) : (
        <p>{say("noGroups")}</p>
      )}
      <EditsOfModel />
    </section>
  );
}

interface PairTableProps {
  label: string;
  rows: HeadPair[];
  value: string;
  route: Route;
  /** Under which name its sorting stands in the link. */
  sortName: string;
  marks: Set<string>;
}

function PairTable({ label, rows, value, route, sortName, marks }: PairTableProps): JSX.Element {
  const words = useWords();
  const { say, number } = words;
  const order = (place: Place) => place[0] * 10_000 + place[1];
  const columns: TableColumn<HeadPair>[] = [
    {
      name: "one",
      label: say("oneHead"),
      by: (pair) => order(pair.one),
      show: (pair) => <PlaceLink place={pair.one} />,
    },
    {
      name: "other",
      label: say("otherHead"),
      by: (pair) => order(pair.other),
      show: (pair) => <PlaceLink place={pair.other} />,
    },
    { name: "near", label: value, numeric: true, by: (pair) => pair.near, show: (pair) => number(pair.value) },
  ];
  const [column = "near", direction = "down"] = (route.query[sortName] ?? "near-down").split("-");
  return (
    <SortableTable
      label={label}
      columns={columns}
      rows={rows}
      first={10}
      keyOf={(pair) => `${keyOf(pair.one)} ${keyOf(pair.other)}`}
      marked={(pair) => marks.has(keyOf(pair.one)) && marks.has(keyOf(pair.other))}
      sorting={{ column, down: direction === "down" }}
      onSort={(next) => go(changed(route, { [sortName]: `${next.column}-${next.down ? "down" : "up"}` }), true)}
    />
  );
}
