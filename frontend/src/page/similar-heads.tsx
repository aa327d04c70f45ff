/** Similar heads: redundant heads, all pairs of heads of a layer, and pairs across layers. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { CodeName, withCodeName } from "../parts/code-name";
import { Select } from "../parts/controls";
import { useLocale } from "../parts/language";
import { replaceQuery, type Route } from "../parts/router";
import { numberColumn, SortableTable, type TableColumn } from "../parts/sortable-table";
import { Line } from "../parts/tokens";
import { EditOfHead, EditsOfModel } from "./edits";
import { headColumn, HeadLink } from "./head-link";
import { LayerMatrices } from "./layer-matrices";
import { keyOf, markedIn, useModel } from "./model";
import { DEFAULT_RELATION, mostSimilar, pairsAcross, pairsOf, type HeadPair } from "./relations";
import { SimilarityHistogram } from "./similarity-histogram";

const MAX_PAIRS = 200;

export function SimilarHeads({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const { page } = model;
  const locale = useLocale();
  const { t, text, number } = locale;
  const names = page.relation_names;
  const find = (name: string | undefined) => names.find((one) => one.name === name);
  const relation = find(route.query.relation) ?? find(DEFAULT_RELATION) ?? names[0];
  const marks = useMemo(() => markedIn(route.query.mark), [route.query.mark]);
  const best = mostSimilar(model);
  return (
    <>
      <h2 tabIndex={-1}>{t("similar")}</h2>
      <p class="lead">
        {best ? (
          <strong>
            {t("mostSimilarPair", {
              one: model.fullName(best.one, locale),
              other: model.fullName(best.other, locale),
              value: number(best.value),
            })}
          </strong>
        ) : null}{" "}
        {t("similarAbout")}
      </p>
      <div class="two">
        <Redundant marks={marks} />
        <SimilarityHistogram />
      </div>

      {relation ? (
        <section aria-labelledby="within-layers">
          <h2 id="within-layers">{t("withinLayers")}</h2>
          <div class="controls">
            <Select
              label={t("relation")}
              value={relation.name}
              onChange={(name) => replaceQuery(route, { relation: name })}
            >
              {names.map((one) => (
                <option value={one.name}>{withCodeName(text(one.label), one.name)}</option>
              ))}
            </Select>
          </div>
          <p class="explained">
            <span>
              <strong>
                <CodeName label={text(relation.label)} name={relation.name} />
              </strong>{" "}
              {text(relation.about)}
            </span>
          </p>
          <LayerMatrices relation={relation} marks={marks} />
          <PairTable
            label={t("mostSimilar", { relation: text(relation.label) })}
            rows={pairsOf(model, relation.name).slice(0, MAX_PAIRS)}
            value={text(relation.label)}
            code={relation.name}
            route={route}
            parameter="pairs"
            marks={marks}
          />
        </section>
      ) : null}

      <section aria-labelledby="across-layers">
        <h2 id="across-layers">{t("acrossLayers")}</h2>
        {page.pairs.length ? (
          <>
            <p class="explained">
              {t("acrossAbout")} {page.facts.pairs_by ? <Line text={text(page.facts.pairs_by)} /> : null}
            </p>
            <PairTable
              label={t("acrossLayers")}
              rows={pairsAcross(model)}
              value={t("cosine")}
              code="cosine"
              route={route}
              parameter="across"
              marks={marks}
            />
          </>
        ) : (
          <p class="muted">{t("noPairs")}</p>
        )}
      </section>
    </>
  );
}

function Redundant({ marks }: { marks: Set<string> }): JSX.Element {
  const { redundant, redundancy } = useModel().page;
  const { t, number } = useLocale();
  const threshold = number(redundancy, "share");
  return (
    <section class="panel" aria-labelledby="redundant">
      <h3 id="redundant">{t("redundant")}</h3>
      <p class="note">{redundancy === null ? t("noRedundancy") : t("redundancyAbout", { threshold })}</p>
      {redundant.length ? (
        <ul class="plain groups">
          {redundant.map(({ head, share, other, alone, cosine }) => (
            <li key={keyOf(head)} class={marks.has(keyOf(head)) ? "marked" : ""}>
              <HeadLink id={head} /> {number(share, "share")}
              <span class="muted">
                {" · "}
                {t("predictedBy", { share: number(alone, "share") })} <HeadLink id={other} />{" "}
                {t("predictedAlone", { cosine: number(cosine) })}
              </span>
              <EditOfHead head={head} />
            </li>
          ))}
        </ul>
      ) : redundancy === null ? null : (
        <p>{t("noRedundant", { threshold })}</p>
      )}
      <EditsOfModel />
    </section>
  );
}

interface PairTableProps {
  label: string;
  rows: HeadPair[];
  value: string;
  /** Name of the measure in files. */
  code: string;
  route: Route;
  parameter: string;
  marks: Set<string>;
}

function PairTable({ value, code, marks, ...table }: PairTableProps): JSX.Element {
  const { t, number } = useLocale();
  const columns: TableColumn<HeadPair>[] = [
    headColumn("one", t("oneHead"), (pair) => pair.one),
    headColumn("other", t("otherHead"), (pair) => pair.other),
    {
      ...numberColumn(
        "similarity",
        value,
        (pair: HeadPair) => pair.similarity,
        (_, pair) => number(pair.value),
      ),
      code,
    },
  ];
  return (
    <SortableTable
      {...table}
      columns={columns}
      first={10}
      keyOf={(pair) => `${keyOf(pair.one)} ${keyOf(pair.other)}`}
      marked={(pair) => marks.has(keyOf(pair.one)) && marks.has(keyOf(pair.other))}
      order="similarity-down"
    />
  );
}
