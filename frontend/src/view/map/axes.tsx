/** Axis of a map: tokens by name where there is room, else by number. */
import type { JSX } from "preact";
import { useLocale } from "../../parts/language";
import { Token } from "../../parts/tokens";
import { ticksOf, type Span } from "./viewport";

interface AxisProps {
  side: "rows" | "columns";
  tokens: string[];
  span: Span;
  /** Start of the first token and size of a token, in pixels. */
  offset: number;
  scale: number;
  chosen: number | undefined;
}

export function MapAxis({ side, tokens, span, offset, scale, chosen }: AxisProps): JSX.Element {
  const { count } = useLocale();
  const { named, ticks } = ticksOf(span, scale);
  const [start, extent] = side === "rows" ? (["top", "height"] as const) : (["left", "width"] as const);
  return (
    <div class={`map-axis map-${side}${named ? " named" : ""}`} aria-hidden="true">
      {ticks.map((token) => (
        <span
          key={token}
          class={token === chosen ? "mark chosen" : "mark"}
          data-token={token}
          style={{
            [start]: `${offset + token * scale}px`,
            [extent]: named ? `${scale}px` : "0px",
            fontSize: named ? `min(0.8rem, ${(scale * 0.85).toFixed(2)}px)` : "0.7rem",
          }}
        >
          {named ? <Token text={tokens[token] ?? ""} longest={24} /> : count(token)}
        </span>
      ))}
    </div>
  );
}
