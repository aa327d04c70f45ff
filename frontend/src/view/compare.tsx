/** The head shown beside another one, and the distance of the two. */
import type { JSX } from "preact";
import type { HeadId } from "../data";
import { Select } from "../parts/controls";
import { replaceQuery, type Route } from "../parts/router";
import { ServerError } from "./api";
import { useViewLocale } from "./language";
import { headExists, layerName } from "./names";
import { useRequest, useStore } from "./store";
import { axisOf, type Slot, type State } from "./types";

interface HeadOfText {
  slot: Slot;
  head: HeadId;
}

/** The head of a link: `B.3.7` is head 7 of layer 3 over text B. */
export function comparedHead(link: string | undefined, state: State): HeadOfText | null {
  const match = /^([AB])\.(\d+)\.(\d+)$/.exec(link ?? "");
  if (!match) return null;
  const head: HeadId = [Number(match[2]), Number(match[3])];
  return headExists(state, head) ? { slot: match[1] as Slot, head } : null;
}

interface ChoiceProps extends HeadOfText {
  route: Route;
  other: HeadOfText | null;
}

export function CompareChoice({ route, slot, head, other }: ChoiceProps): JSX.Element {
  const store = useStore();
  const locale = useViewLocale();
  const { t } = locale;
  const { layers } = store.state;
  const slots = store.loaded.map((trace) => trace.slot);
  const choose = (chosen: HeadOfText | null) =>
    replaceQuery(route, { with: chosen && `${chosen.slot}.${chosen.head.join(".")}` });
  // Initially the same head over the other text, or the next head.
  const otherSlot = slots.find((each) => each !== slot);
  const heads = layers[head[0]]?.heads ?? 1;
  const initial: HeadOfText = otherSlot ? { slot: otherSlot, head } : { slot, head: [head[0], (head[1] + 1) % heads] };
  const chooseLayer = (layer: number) =>
    other && choose({ ...other, head: [layer, Math.min(other.head[1], (layers[layer]?.heads ?? 1) - 1)] });
  return (
    <span class="compare" role="group" aria-label={t("compareWith")}>
      <button type="button" aria-pressed={other !== null} onClick={() => choose(other ? null : initial)}>
        {t("compareWith")}
      </button>
      {other ? (
        <>
          <Select
            label={t("theText")}
            value={other.slot}
            onChange={(value) => choose({ ...other, slot: value as Slot })}
          >
            {slots.map((each) => (
              <option value={each}>{each}</option>
            ))}
          </Select>
          <Select label={t("whichLayer")} value={other.head[0]} onChange={(value) => chooseLayer(Number(value))}>
            {layers.map((_, layer) => (
              <option value={String(layer)}>{layerName(store.state, layer, locale)}</option>
            ))}
          </Select>
          <Select
            label={t("head")}
            value={other.head[1]}
            onChange={(value) => choose({ ...other, head: [other.head[0], Number(value)] })}
          >
            {Array.from({ length: layers[other.head[0]]?.heads ?? 0 }, (_, number) => (
              <option value={String(number)}>{number}</option>
            ))}
          </Select>
        </>
      ) : null}
    </span>
  );
}

type Answer = { distance: number } | { reason: string };

export function Distance({ one, other }: { one: HeadOfText; other: HeadOfText }): JSX.Element {
  const store = useStore();
  const { t, number } = useViewLocale();
  const ends = [one, other].map(({ slot, head: [layer, head] }) => ({ trace: store.traces[slot]?.id, layer, head }));
  const [size, otherSize] = [one, other].map(({ slot, head }) => {
    const [trace, info] = [store.traces[slot], store.state.layers[head[0]]];
    return trace && info && `${axisOf(trace, info.queries).tokens.length} ${axisOf(trace, info.keys).tokens.length}`;
  });
  const comparable = size === otherSize;
  // Under different masks two heads have no distance: that is an answer and no error.
  const explain = (error: unknown): Answer | null =>
    error instanceof ServerError && error.kind === "invalid" ? { reason: error.message } : null;
  const body = comparable ? { one: ends[0], other: ends[1] } : null;
  const answer = useRequest<Answer>("distance", body, explain);
  let text = t(comparable ? "distanceComputing" : "distanceUnlike");
  if (answer && "reason" in answer) text = t("distanceNone", { reason: answer.reason });
  else if (answer) {
    text = t("distanceIs", { distance: number(answer.distance), most: number(Math.sqrt(Math.log(2))) });
  }
  return (
    <p class="distance" role="status" data-distance={answer && "distance" in answer ? answer.distance : undefined}>
      {text}
    </p>
  );
}
