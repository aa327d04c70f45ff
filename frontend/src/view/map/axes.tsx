/** The tokens along both sides of a map, by name when there is room, else by number. */
import type { JSX } from "preact";
import { useWords } from "../../parts/language";
import { Token } from "../../parts/tokens";
import { marksOf, type Span } from "./viewport";

interface AxisProps {
  side: "rows" | "columns";
  tokens: string[];
  span: Span;
  /** Where the first token of the text begins, in pixels, and how large one is. */
  offset: number;
  scale: number;
  chosen: number | null;
}

export function MapAxis({ side, tokens, span, offset, scale, chosen }: AxisProps): JSX.Element {
  const { count } = useWords();
  const { named, marks } = marksOf(span, scale);
  const [start, extent] = side === "rows" ? (["top", "height"] as const) : (["left", "width"] as const);
  return (
    <div class={`map-axis map-${side}${named ? " named" : ""}`} aria-hidden="true">
      {marks.map((token) => (
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
