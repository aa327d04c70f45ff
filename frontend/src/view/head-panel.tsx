/** One head over one text: attention on the words, and the attention matrix. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { part as partOf, unpack, type HeadId, type Packed } from "../data";
import { TopTokens, topOf, type TopToken } from "../parts/attention-words";
import { plainToken } from "../parts/tokens";
import { useViewLocale } from "./language";
import { AttentionMap } from "./map/attention-map";
import type { MapView } from "./map/position";
import type { Span } from "./map/viewport";
import { headName } from "./names";
import { useRequest, useStore } from "./store";
import { HeadLines } from "./head-lines";
import { TextWords, usePart, type ChosenWord } from "./text-words";
import { rowOf, type HeadRow, type Side, type TokenRows } from "./token-rows";
import { axisOf, headKey, tokenAt, type AxisName, type LayerInfo, type Trace } from "./types";

const TOP = 8;
const NUMBERED = 300; // words of a text from which the positions of words are listed
const LEAST = 0.0005; // smaller weights are not listed

interface HeadPanelProps {
  trace: Trace;
  head: HeadId;
  chosen: ChosenWord;
  rows: TokenRows | null;
  /** Shared by the maps side by side. */
  mapView: MapView;
  /** Shows the name of the head, where two are side by side. */
  titled: boolean;
  /** Draws lines between the words. */
  lines: boolean;
}

export function HeadPanel({ mapView, titled, lines, ...props }: HeadPanelProps): JSX.Element | null {
  const { trace, head, chosen } = props;
  const { state } = useStore();
  const locale = useViewLocale();
  const info = state.layers[head[0]];
  if (!info) return null;
  const name = headName(state, head, locale);
  return (
    <article class="head-panel" data-head={headKey(head)} data-slot={trace.slot}>
      {titled ? <h3>{locale.t("mapOf", { head: name, slot: trace.slot })}</h3> : null}
      <HeadWords {...props} info={info} />
      {lines ? <HeadLines {...{ trace, head, info, chosen }} /> : null}
      <AttentionMap
        trace={trace}
        head={head}
        mapView={mapView}
        onPick={({ query }) => chosen.pin({ axis: info.queries, index: query })}
      />
    </article>
  );
}

type HeadWordsProps = Omit<HeadPanelProps, "titled" | "mapView" | "lines"> & { info: LayerInfo };

function HeadWords({ trace, head, info, chosen, rows }: HeadWordsProps): JSX.Element {
  const { t } = useViewLocale();
  const cross = info.queries !== info.keys;
  const attends = rowOf(rows, head, "attends");
  const attended = rowOf(rows, head, "attended");
  const word = plainToken((chosen.shown && tokenAt(trace, chosen.shown)) ?? "");
  const average = useAverage(trace, head);
  const line = { trace, head, chosen, attends, attended, average };
  const list = (title: string, top: TopToken[], axis: AxisName, kind: "shade" | "underline") => {
    const { tokens } = axisOf(trace, axis);
    return <TopTokens {...{ title, top, tokens, kind }} least={LEAST} numbered={tokens.length > NUMBERED} />;
  };
  return (
    <div class="head-words">
      <p class="note">{t("wordsAbout")}</p>
      <div>
        <div>
          {cross ? <p class="line-name">{t("queries")}</p> : null}
          <Line axisName={info.queries} {...line} isKeys={!cross} isQueries />
          {cross ? (
            <>
              <p class="line-name">{t("keys")}</p>
              <Line axisName={info.keys} {...line} isKeys isQueries={false} />
            </>
          ) : null}
        </div>
        <div class="strongest" aria-live="polite">
          {average && !chosen.shown ? list(t("mostAttended"), topOf(average, TOP), info.keys, "shade") : null}
          {attends ? list(t("wordAttendsTo", { word }), attends.top, info.keys, "shade") : null}
          {attended ? list(t("wordAttendedBy", { word }), attended.top, info.queries, "underline") : null}
        </div>
      </div>
    </div>
  );
}

interface LineProps {
  axisName: AxisName;
  trace: Trace;
  head: HeadId;
  chosen: ChosenWord;
  attends: HeadRow | null;
  attended: HeadRow | null;
  average: Float32Array | null;
  /** True if the words are keys, which are shaded, and if they are queries, which are underlined. */
  isKeys: boolean;
  isQueries: boolean;
}

function Line({ axisName, average, isKeys, isQueries, ...props }: LineProps): JSX.Element {
  const { trace, chosen } = props;
  const part = usePart(trace, axisName, chosen);
  const attends = useExactWeights(props, isKeys ? props.attends : null, "attends", part.span);
  const attended = useExactWeights(props, isQueries ? props.attended : null, "attended", part.span);
  const received = isKeys && !chosen.shown ? average?.subarray(...part.span) : null;
  return <TextWords {...{ trace, axisName, part, chosen }} shade={received ?? attends} underline={attended} />;
}

/** The mean weight on each key, where all weights are loaded. */
function useAverage(trace: Trace, head: HeadId): Float32Array | null {
  const pictures = useStore().pictures.get(trace.id);
  const weights = pictures?.precision.kind === "weights" ? pictures.layers.get(head[0]) : undefined;
  return useMemo(() => {
    if (!weights) return null;
    const { shape, values } = partOf(weights, head[1]);
    const [queries = 0, keys = 0] = shape;
    const means = new Float32Array(keys);
    values.forEach((value, i) => (means[i % keys]! += value / queries));
    return means;
  }, [weights, head[1]]);
}

/** The single weights of a span of a row; for a long text the row itself holds only maxima of blocks. */
function useExactWeights(
  { trace, head, chosen }: Pick<LineProps, "trace" | "head" | "chosen">,
  row: HeadRow | null,
  side: Side,
  [first, end]: Span,
): Float32Array | null {
  const token = row && row.block > 1 ? chosen.shown : null;
  const one = token && [token.index, token.index + 1];
  const [rows, columns] = side === "attends" ? [one, [first, end]] : [[first, end], one];
  const body = token && { trace: trace.id, layer: head[0], head: head[1], rows, columns };
  const exact = useRequest<{ weights: Packed }>("window", body);
  if (!row) return null;
  return token ? exact && unpack(exact.weights).values : row.cells.subarray(first, end);
}
