/** Attention of one head as lines between the words of a text, or of a part of a long one. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { unpack, type HeadId, type Packed } from "../data";
import { Lines, LINES_WIDTH, linesSvg } from "../parts/attention-lines";
import type { Chosen, Weights } from "../parts/attention-words";
import { Figure } from "../parts/figure";
import { useViewLocale } from "./language";
import { headName } from "./names";
import { useRequest, useStore } from "./store";
import { PartChoice, usePart, type ChosenWord } from "./text-words";
import { axisOf, type LayerInfo, type Trace } from "./types";

const PART = 256; // words per side

interface HeadLinesProps {
  trace: Trace;
  head: HeadId;
  info: LayerInfo;
  chosen: ChosenWord;
}

export function HeadLines({ trace, head, info, chosen }: HeadLinesProps): JSX.Element {
  const { state } = useStore();
  const locale = useViewLocale();
  const { t } = locale;
  const cross = info.queries !== info.keys;
  const queries = usePart(trace, info.queries, chosen, PART);
  const keysOfCross = usePart(trace, info.keys, chosen, PART);
  const keys = cross ? keysOfCross : queries;
  const body = { trace: trace.id, layer: head[0], head: head[1], rows: queries.span, columns: keys.span };
  const found = useRequest<{ weights: Packed }>("window", body);
  const weights = useMemo<Weights | null>(() => {
    if (!found) return null;
    return {
      queries: axisOf(trace, info.queries).tokens.slice(...queries.span),
      keys: axisOf(trace, info.keys).tokens.slice(...keys.span),
      values: unpack(found.weights).values,
      cross,
    };
  }, [found]);
  const name = headName(state, head, locale);
  const text = { title: t("mapOf", { head: name, slot: trace.slot }), queries: t("queries"), keys: t("keys"), notANumber: t("notANumber") };
  const chosenHere = chosenIn(chosen, info, { query: queries.span[0], key: keys.span[0] }, weights);
  const isPart = [queries, keys].some(({ total, size }) => total > size);
  return (
    <Figure
      class="head-lines"
      title={t("lines")}
      note={isPart ? t("linesOfPart") : t("linesAbout")}
      name={`lines-${head.join("-")}-${trace.slot}`}
      fileTitle={`${text.title}: ${state.model.name}`}
      draw={weights && (() => linesSvg(weights, chosenHere, text, LINES_WIDTH))}
    >
      <PartChoice part={queries} />
      {cross ? <PartChoice part={keys} /> : null}
      {weights ? <Lines weights={weights} chosen={chosenHere} text={text} /> : <p class="note">{t("loading")}</p>}
    </Figure>
  );
}

/** The chosen word, if it is among those that are drawn. */
function chosenIn(
  { shown }: ChosenWord,
  info: LayerInfo,
  first: Record<Chosen["line"], number>,
  weights: Weights | null,
): Chosen | null {
  if (!shown || !weights) return null;
  const line = shown.axis === info.queries ? "query" : "key";
  if (line === "key" && shown.axis !== info.keys) return null;
  const index = shown.index - first[line];
  return index >= 0 && index < (line === "key" ? weights.keys : weights.queries).length ? { line, index } : null;
}
