/** Example sentences with one head's attention drawn on the words. */
import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { part, unpack, type Example, type Place } from "../data";
import { linesSvg } from "../parts/attention-lines";
import { AttentionWords, type Chosen, type Weights } from "../parts/attention-words";
import { Figure } from "../parts/figure";
import { useWords } from "../parts/language";
import { changed, go, type Route } from "../parts/router";
import { Token } from "../parts/tokens";
import { useModel } from "./model";

const FILE_WIDTH = 560;

function weightsOf(example: Example, [site, head]: Place, cross: boolean): Weights | null {
  const packed = example.sites[String(site)];
  if (!packed) return null;
  return { queries: example.queries, keys: example.keys, values: part(unpack(packed), head).values, cross };
}

/** Which word a link names: `3`, or `k3` of the line that is looked at. */
function chosenIn(word: string | undefined, weights: Weights): Chosen | null {
  const match = /^(k?)(\d+)$/.exec(word ?? "");
  if (!match) return null;
  const line = match[1] ? "key" : "query";
  const index = Number(match[2]);
  return index < (line === "key" ? weights.keys : weights.queries).length ? { line, index } : null;
}

export function HeadExamples({ place, route }: { place: Place; route: Route }): JSX.Element | null {
  const model = useModel();
  const words = useWords();
  const { say } = words;
  const there = model.page.examples.filter((example) => example.sites[String(place[0])]);
  const number = Math.min(there.length - 1, Math.max(0, Math.floor(Number(route.query.example ?? 0)) || 0));
  const example = there[number];
  const cross = model.page.sites[place[0]]?.kind === "cross";
  const weights = useMemo(() => (example ? weightsOf(example, place, cross) : null), [example, place[0], place[1]]);
  if (!example || !weights) return null;
  const chosen = chosenIn(route.query.word, weights);
  const lines = route.query.draw === "lines";
  const set = (query: Record<string, string | number | null>) => go(changed(route, query), true);
  const texts = { title: model.long(place, words), look: say("theseLook"), lookedAt: say("theseAreLookedAt") };
  return (
    <Figure
      class="wide"
      title={say("examples")}
      note={say(cross ? "examplesAboutTwo" : "examplesAbout")}
      name={`head-${place.join("-")}-words`}
      fileTitle={`${model.long(place, words)}: ${say("examples")}`}
      draw={() => linesSvg(weights, chosen, texts, FILE_WIDTH)}
      controls={
        <span class="segments" role="group" aria-label={say("drawAs")}>
          <button type="button" aria-pressed={!lines} onClick={() => set({ draw: null })}>
            {say("asWords")}
          </button>
          <button type="button" aria-pressed={lines} onClick={() => set({ draw: "lines" })}>
            {say("asLines")}
          </button>
        </span>
      }
    >
      {there.length > 1 ? (
        <div class="segments" role="group" aria-label={say("whichExample")}>
          {there.map((one, i) => (
            <button type="button" aria-pressed={i === number} onClick={() => set({ example: i, word: null })}>
              <Token text={one.title} />
            </button>
          ))}
        </div>
      ) : null}
      <AttentionWords
        key={number}
        label={say("exampleNumber", { number: number + 1 })}
        weights={weights}
        chosen={chosen}
        onChoose={(next) => set({ word: next ? `${next.line === "key" ? "k" : ""}${next.index}` : null })}
      />
      {lines ? <Lines weights={weights} chosen={chosen} texts={texts} /> : null}
    </Figure>
  );
}

interface LinesProps {
  weights: Weights;
  chosen: Chosen | null;
  texts: { title: string; look: string; lookedAt: string };
}

function Lines({ weights, chosen, texts }: LinesProps): JSX.Element {
  const place = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const host = place.current;
    if (host) host.replaceChildren(linesSvg(weights, chosen, texts, Math.min(FILE_WIDTH, host.clientWidth)));
  }, [weights, chosen?.line, chosen?.index, texts.title, texts.look]);
  return <div class="chart lines" ref={place} />;
}
