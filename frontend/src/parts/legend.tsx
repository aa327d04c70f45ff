/** What the colours mean: a ramp with its ends, or a list of kinds. */
import type { JSX } from "preact";
import { inkOn, type Scale } from "./colour";

const STOPS = 24;

interface RampLegendProps {
  scale: Scale;
  format: (value: number) => string;
}

/** The ramp as the scale bends it: its middle is the middle value's colour. */
export function RampLegend({ scale, format }: RampLegendProps): JSX.Element {
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
    </div>
  );
}

export interface Kind {
  key: string;
  letters: string;
  label: string;
  about: string;
  colour: string;
  count: number;
}

/** The kinds as buttons: one that is pressed alone stays lit. */
export function KindLegend(props: {
  label: string;
  kinds: Kind[];
  chosen: string;
  onChoose: (key: string) => void;
}): JSX.Element {
  return (
    <ul class="kinds" aria-label={props.label}>
      {props.kinds.map((kind) => (
        <li key={kind.key}>
          <button
            type="button"
            class="kind"
            aria-pressed={props.chosen === kind.key}
            title={kind.about}
            onClick={() => props.onChoose(props.chosen === kind.key ? "" : kind.key)}
          >
            <span class="swatch" style={{ background: kind.colour, color: inkOn(kind.colour) }} aria-hidden="true">
              {kind.letters}
            </span>
            {kind.label} <span class="muted">{kind.count}</span>
          </button>
        </li>
      ))}
    </ul>
  );
}
