/** A head's place, as a link to its card. */
import type { JSX } from "preact";
import type { Place } from "../data";
import { useWords } from "../parts/language";
import { headHref, useModel } from "./model";

export function PlaceLink({ place }: { place: Place }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const origin = model.head(place)?.origin;
  return (
    <a href={headHref(place)} aria-label={model.long(place, words)}>
      {model.short(place, words)}
      {origin ? <span class="note"> {words.text(origin)}</span> : null}
    </a>
  );
}
