/** Legends: a colour ramp, or a list of categories. */
import type { JSX } from "preact";
import { textColourOn } from "./colour";
import type { Ramp } from "./svg";

const STOPS = 24;

/** The ramp of a scale, linear in the values. */
export function RampLegend({ scale, format, missing }: Ramp): JSX.Element {
  const colours = Array.from({ length: STOPS + 1 }, (_, i) =>
    scale.of(scale.low + (i / STOPS) * (scale.high - scale.low)),
  );
  const middle = (scale.low + scale.high) / 2;
  return (
    <div class="ramp">
      <div class="ramp-bar" style={{ background: `linear-gradient(to right, ${colours.join(", ")})` }} />
      <div class="ramp-ends">
        <span>{format(scale.low)}</span>
        <span>{format(middle)}</span>
        <span>{format(scale.high)}</span>
      </div>
      {missing ? (
        <p class="ramp-missing">
          <span class="missing" aria-hidden="true" /> {missing}
        </p>
      ) : null}
    </div>
  );
}

export interface Category {
  key: string;
  letters: string;
  label: string;
  about: string;
  colour: string;
  count: number;
}

/** Categories as buttons; pressing one selects it alone. */
export function CategoryLegend(props: {
  label: string;
  categories: Category[];
  chosen: string;
  onChoose: (key: string) => void;
}): JSX.Element {
  return (
    <ul class="plain categories" aria-label={props.label}>
      {props.categories.map((category) => (
        <li key={category.key}>
          <button
            type="button"
            class="category"
            aria-pressed={props.chosen === category.key}
            title={category.about}
            onClick={() => props.onChoose(props.chosen === category.key ? "" : category.key)}
          >
            <span
              class="swatch"
              style={{ background: category.colour, color: textColourOn(category.colour) }}
              aria-hidden="true"
            >
              {category.letters}
            </span>
            {category.label} <span class="muted">{category.count}</span>
          </button>
        </li>
      ))}
    </ul>
  );
}
