/** What heads, layers and stacks are called. */
import type { ViewWords } from "./language";
import type { HeadAt, State } from "./types";

/** Empty where the model has one stack alone. */
export function stackName(state: State, place: number, { say }: ViewWords): string {
  const info = state.places[place];
  if (!info || state.stacks.length < 2) return "";
  if (info.keys !== info.queries) return say("crossing");
  if (info.queries === "target") return say("decoder");
  return state.places.some((other) => other.queries === "target") ? say("encoder") : info.stack;
}

export function layerName(state: State, place: number, words: ViewWords): string {
  const layer = words.say("layerName", { layer: state.places[place]?.layer ?? place });
  const stack = stackName(state, place, words);
  return stack ? words.say("placeIn", { place: layer, stack }) : layer;
}

export function headName(state: State, [place, head]: HeadAt, words: ViewWords): string {
  const own = words.say("place", { layer: state.places[place]?.layer ?? place, head });
  const origin = state.places[place]?.origins[head];
  const name = origin ? words.say("placeFrom", { place: own, origin: words.text(origin) }) : own;
  const stack = stackName(state, place, words);
  return stack ? words.say("placeIn", { place: name, stack }) : name;
}

export function headExists(state: State, [place, head]: HeadAt): boolean {
  return Number.isInteger(place) && Number.isInteger(head) && head >= 0 && head < (state.places[place]?.heads ?? 0);
}

/** All heads in the order of depth. */
export function allHeads(state: State): HeadAt[] {
  return state.places.flatMap(({ heads }, place) => Array.from({ length: heads }, (_, head): HeadAt => [place, head]));
}
