/** Example texts with the attention of one head on their words. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { part, unpack, type Example, type HeadId } from "../data";
import { Lines, LINES_WIDTH, LinesChoice, linesSvg } from "../parts/attention-lines";
import { AttentionWords, type Chosen, type Weights } from "../parts/attention-words";
import { Segments } from "../parts/controls";
import { Figure } from "../parts/figure";
import { useLocale } from "../parts/language";
import { replaceQuery, type Query, type Route } from "../parts/router";
import { Token } from "../parts/tokens";
import { useModel } from "./model";

function weightsOf(example: Example, [site, head]: HeadId, cross: boolean): Weights | null {
  const packed = example.sites[String(site)];
  if (!packed) return null;
  return { queries: example.queries, keys: example.keys, values: part(unpack(packed), head).values, cross };
}

/** The word of a link: `3`, or `k3` among the keys. */
function chosenIn(word: string | undefined, weights: Weights): Chosen | null {
  const match = /^(k?)(\d+)$/.exec(word ?? "");
  if (!match) return null;
  const line = match[1] ? "key" : "query";
  const index = Number(match[2]);
  return index < (line === "key" ? weights.keys : weights.queries).length ? { line, index } : null;
}

export function HeadExamples({ id, route }: { id: HeadId; route: Route }): JSX.Element | null {
  const model = useModel();
  const locale = useLocale();
  const { t } = locale;
  const examples = model.page.examples.filter((example) => example.sites[String(id[0])]);
  const number = Math.min(examples.length - 1, Math.max(0, Math.floor(Number(route.query.example ?? 0)) || 0));
  const example = examples[number];
  const cross = model.page.sites[id[0]]?.kind === "cross";
  const weights = useMemo(() => (example ? weightsOf(example, id, cross) : null), [example, ...id]);
  if (!example || !weights) return null;
  const chosen = chosenIn(route.query.word, weights);
  const set = (query: Query) => replaceQuery(route, query);
  const name = model.fullName(id, locale);
  const text = { title: name, queries: t("queries"), keys: t("keys"), notANumber: t("notANumber") };
  const lines = route.query.draw === "lines";
  return (
    <Figure
      class="wide"
      title={t("examples")}
      note={t(cross ? "examplesAboutTwo" : "examplesAbout")}
      name={`head-${id.join("-")}-words`}
      fileTitle={`${name}: ${t("examples")}`}
      draw={() => linesSvg(weights, chosen, text, LINES_WIDTH)}
      controls={<LinesChoice lines={lines} onChange={(value) => set({ draw: value ? "lines" : null })} />}
    >
      {examples.length > 1 ? (
        <Segments
          label={t("whichExample")}
          options={examples.map((one, i) => [i, <Token text={one.title} />])}
          value={number}
          onChange={(i) => set({ example: i, word: null })}
        />
      ) : null}
      <AttentionWords
        key={number}
        label={t("exampleNumber", { number: number + 1 })}
        weights={weights}
        chosen={chosen}
        onChoose={(next) => set({ word: next && `${next.line === "key" ? "k" : ""}${next.index}` })}
      />
      {lines ? <Lines weights={weights} chosen={chosen} text={text} /> : null}
    </Figure>
  );
}
