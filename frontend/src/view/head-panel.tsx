/** One head over one text: attention on the words, and the whole matrix as a map. */
import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { unpack, part as partOf, type Packed } from "../data";
import { plainToken } from "../parts/tokens";
import { ask } from "./api";
import { useView } from "./language";
import { AttentionMap } from "./map/attention-map";
import type { Outlook } from "./map/position";
import type { Span } from "./map/viewport";
import { headName } from "./names";
import { useStore } from "./store";
import { TextWords, TopTokens, usePart, type ChosenWord } from "./text-words";
import { axisOf, headKey, type AxisName, type HeadAt, type PlaceInfo, type Reading } from "./types";
import { rowOf, type ChosenToken, type HeadRow, type Side, type WordRows } from "./words";

interface HeadPanelProps {
  reading: Reading;
  head: HeadAt;
  chosen: ChosenWord;
  rows: WordRows | null;
  /** Where its map looks, and those beside it. */
  outlook: Outlook;
  /** With the head's name over it, where two stand side by side. */
  titled: boolean;
}

export function HeadPanel({ reading, head, chosen, rows, outlook, titled }: HeadPanelProps): JSX.Element | null {
  const store = useStore();
  const words = useView();
  const { say } = words;
  const info = store.state.places[head[0]];
  if (!info) return null;
  const name = headName(store.state, head, words);
  return (
    <article class="head-panel" data-head={headKey(head)} data-slot={reading.slot}>
      {titled ? <h3>{say("mapOf", { head: name, slot: reading.slot })}</h3> : null}
      <HeadWords reading={reading} head={head} info={info} chosen={chosen} rows={rows} />
      <AttentionMap
        reading={reading}
        head={head}
        outlook={outlook}
        onPick={({ query }) => chosen.keep({ axis: info.queries, index: query })}
      />
    </article>
  );
}

type HeadWordsProps = Omit<HeadPanelProps, "titled" | "outlook"> & { info: PlaceInfo };

function HeadWords({ reading, head, info, chosen, rows }: HeadWordsProps): JSX.Element {
  const { say } = useView();
  const cross = info.queries !== info.keys;
  const attends = rowOf(rows, head, "attends");
  const attended = rowOf(rows, head, "attended");
  const token = chosen.shown ? axisOf(reading, chosen.shown.axis).tokens[chosen.shown.index] : undefined;
  const word = plainToken(token ?? "");
  const average = useAverage(reading, head);
  return (
    <div class="head-words">
      <p class="note">{say("wordsAbout")}</p>
      <div>
        <div>
          {cross ? <p class="line-name">{say("theseLook")}</p> : null}
          <Line axisName={info.queries} {...{ reading, head, chosen, rows, average }} shades={!cross} underlines />
          {cross ? (
            <>
              <p class="line-name">{say("theseAreLookedAt")}</p>
              <Line axisName={info.keys} {...{ reading, head, chosen, rows, average }} shades underlines={false} />
            </>
          ) : null}
        </div>
        <div class="strongest" aria-live="polite">
          {average && !chosen.shown ? (
            <TopTokens
              title={say("lookedAtOnAverage")}
              row={strongestOf(average)}
              axis={axisOf(reading, info.keys)}
              kind="shade"
            />
          ) : null}
          {attends ? (
            <TopTokens
              title={say("wordLooksAt", { word })}
              row={attends}
              axis={axisOf(reading, info.keys)}
              kind="shade"
            />
          ) : null}
          {attended ? (
            <TopTokens
              title={say("wordSeenBy", { word })}
              row={attended}
              axis={axisOf(reading, info.queries)}
              kind="underline"
            />
          ) : null}
        </div>
      </div>
    </div>
  );
}

interface LineProps {
  axisName: AxisName;
  reading: Reading;
  head: HeadAt;
  chosen: ChosenWord;
  rows: WordRows | null;
  average: Float32Array | null;
  /** Whether the words of this line are looked at, and whether they look. */
  shades: boolean;
  underlines: boolean;
}

function Line({ axisName, reading, head, chosen, rows, average, shades, underlines }: LineProps): JSX.Element {
  const { say } = useView();
  const axis = axisOf(reading, axisName);
  const part = usePart(axis.tokens.length, chosen.kept?.axis === axisName ? chosen.kept.index : null);
  const attends = useExact(reading, head, chosen.shown, rowOf(rows, head, "attends"), "attends", part.span);
  const attended = useExact(reading, head, chosen.shown, rowOf(rows, head, "attended"), "attended", part.span);
  return (
    <TextWords
      axis={axis}
      axisName={axisName}
      label={say(axisName === "text" ? "textLine" : "targetLine")}
      part={part}
      shade={shades ? (chosen.shown ? attends : (average?.subarray(...part.span) ?? null)) : null}
      underline={underlines ? attended : null}
      chosen={chosen.shown}
      kept={chosen.kept}
      onKeep={chosen.keep}
      onPoint={chosen.point}
    />
  );
}

/** What each word receives on average, where every weight is at hand. */
function useAverage(reading: Reading, head: HeadAt): Float32Array | null {
  const pictures = useStore().pictures.get(reading.id);
  const found = pictures?.how.kind === "weights" ? pictures.places.get(head[0]) : undefined;
  return useMemo(() => {
    if (!found) return null;
    const { shape, values } = partOf(found, head[1]);
    const [queries = 0, keys = 0] = shape;
    const means = new Float32Array(keys);
    values.forEach((value, i) => (means[i % keys]! += value / queries));
    return means;
  }, [found, head[1]]);
}

const STRONGEST = 8;

function strongestOf(cells: Float32Array): HeadRow {
  const top = Array.from(cells, (weight, token) => ({ token, weight }));
  top.sort((one, other) => other.weight - one.weight);
  return { cells, block: 1, top: top.slice(0, STRONGEST) };
}

/** A row's single weights for the words that are drawn; of a long text the row holds only the largest of many. */
function useExact(
  reading: Reading,
  head: HeadAt,
  chosen: ChosenToken | null,
  row: HeadRow | null,
  side: Side,
  [first, end]: Span,
): ArrayLike<number> | null {
  const store = useStore();
  const [found, setFound] = useState<{ key: string; values: ArrayLike<number> } | null>(null);
  const pooled = row !== null && row.block > 1 && chosen !== null;
  const key = pooled ? `${reading.id}/${headKey(head)}/${chosen.axis}/${chosen.index}/${first}` : "";
  useEffect(() => {
    if (!key || !chosen) return;
    const controller = new AbortController();
    const one: Span = [chosen.index, chosen.index + 1];
    const [rows, columns] = side === "attends" ? [one, [first, end]] : [[first, end], one];
    ask<{ weights: Packed }>(
      "window",
      { reading: reading.id, place: head[0], head: head[1], rows, columns },
      controller.signal,
    )
      .then(({ weights }) => setFound({ key, values: unpack(weights).values }))
      .catch((error) => store.fail(error));
    return () => controller.abort();
  }, [key]);
  if (!row) return null;
  if (!pooled) return row.cells.subarray(first, end);
  return found?.key === key ? found.values : null;
}
