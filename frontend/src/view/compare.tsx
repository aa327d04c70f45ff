/** Which other head stands beside one, and how far the two are apart. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { changed, go, type Route } from "../parts/router";
import { calledOff, follow, ServerError } from "./api";
import { useView } from "./language";
import { headExists, layerName } from "./names";
import { SLOTS, useStore, type Store } from "./store";
import { axisOf, headKey, type HeadAt, type Slot, type State } from "./types";

export interface Other {
  slot: Slot;
  head: HeadAt;
}

/** What a link names: `B.3.7` is head 7 of place 3 over text B. */
export function otherOf(named: string | undefined, state: State): Other | null {
  const match = /^([AB])\.(\d+)\.(\d+)$/.exec(named ?? "");
  if (!match) return null;
  const head: HeadAt = [Number(match[2]), Number(match[3])];
  return headExists(state, head) ? { slot: match[1] as Slot, head } : null;
}

interface ChoiceProps {
  route: Route;
  slot: Slot;
  head: HeadAt;
  other: Other | null;
}

export function CompareChoice({ route, slot, head, other }: ChoiceProps): JSX.Element {
  const store = useStore();
  const words = useView();
  const { say } = words;
  const texts = SLOTS.filter((each) => store.readings[each]);
  const choose = (chosen: Other | null) =>
    go(changed(route, { with: chosen ? `${chosen.slot}.${chosen.head.join(".")}` : null }), true);
  // A first guess: the same head over the other text, or the next head.
  const beside = texts.find((each) => each !== slot);
  const heads = store.state.places[head[0]]?.heads ?? 1;
  const guess: Other = beside ? { slot: beside, head } : { slot, head: [head[0], (head[1] + 1) % heads] };
  return (
    <span class="compare" role="group" aria-label={say("compareWith")}>
      <button type="button" aria-pressed={other !== null} onClick={() => choose(other ? null : guess)}>
        {say("compareWith")}
      </button>
      {other ? (
        <>
          <label>
            {say("whichText")}{" "}
            <select
              aria-label={say("whichText")}
              value={other.slot}
              onChange={(event) => choose({ ...other, slot: event.currentTarget.value as Slot })}
            >
              {texts.map((each) => (
                <option value={each}>{each}</option>
              ))}
            </select>
          </label>
          <label>
            {say("whichLayer")}{" "}
            <select
              aria-label={say("whichLayer")}
              value={String(other.head[0])}
              onChange={(event) => {
                const place = Number(event.currentTarget.value);
                const most = (store.state.places[place]?.heads ?? 1) - 1;
                choose({ ...other, head: [place, Math.min(other.head[1], most)] });
              }}
            >
              {store.state.places.map((_, place) => (
                <option value={String(place)}>{layerName(store.state, place, words)}</option>
              ))}
            </select>
          </label>
          <label>
            {say("whichHead")}{" "}
            <select
              aria-label={say("whichHead")}
              value={String(other.head[1])}
              onChange={(event) => choose({ ...other, head: [other.head[0], Number(event.currentTarget.value)] })}
            >
              {Array.from({ length: store.state.places[other.head[0]]?.heads ?? 0 }, (_, number) => (
                <option value={String(number)}>{number}</option>
              ))}
            </select>
          </label>
        </>
      ) : null}
    </span>
  );
}

/** How many tokens look and are looked at. */
function sizeOf(store: Store, { slot, head }: Other): string {
  const reading = store.readings[slot];
  const info = store.state.places[head[0]];
  if (!reading || !info) return "";
  return `${axisOf(reading, info.queries).tokens.length} x ${axisOf(reading, info.keys).tokens.length}`;
}

type Told = { distance: number; divergence: number } | { reason: string } | null;

export function Distance({ one, other }: { one: Other; other: Other }): JSX.Element {
  const store = useStore();
  const { say, number } = useView();
  const [told, setTold] = useState<Told>(null);
  const ends = [one, other].map((end) => ({
    reading: store.readings[end.slot]?.id ?? -1,
    place: end.head[0],
    head: end.head[1],
  }));
  const sizes = [one, other].map((end) => sizeOf(store, end));
  const unlike = sizes[0] !== sizes[1];
  const key = [one, other].map((end) => `${store.readings[end.slot]?.id}/${headKey(end.head)}`).join(" ");
  useEffect(() => {
    const controller = new AbortController();
    setTold(null);
    if (unlike) return;
    follow<{ distance: number; divergence: number }>(
      "distance",
      { one: ends[0], other: ends[1] },
      () => {},
      controller.signal,
    )
      .then(setTold)
      .catch((error) => {
        // Under different masks two heads have no distance: that is an answer, and nothing is wrong.
        if (error instanceof ServerError && error.kind === "invalid") setTold({ reason: error.message });
        else if (!calledOff(error)) store.fail(error);
      });
    return () => controller.abort();
  }, [key]);
  const most = number(Math.sqrt(Math.log(2)));
  const text = unlike
    ? say("distanceUnlike")
    : !told
      ? say("distanceComputing")
      : "reason" in told
        ? say("distanceNone", { reason: told.reason })
        : say("distanceIs", { distance: number(told.distance), most });
  return (
    <p class="distance" role="status" data-distance={told && "distance" in told ? told.distance : undefined}>
      {text}
    </p>
  );
}
