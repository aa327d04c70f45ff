/** Attention as lines between two columns of words: the words that look on the left, those looked at on the right. */
import { weightAt, type Chosen, type Weights } from "./attention-words";
import { newDrawing } from "./svg";
import { plainToken } from "./tokens";

const STEP = 20;
const TOP = 34;
const FAINTEST = 0.02;
const LETTER = 7.6; // about the width of one at 13 px

interface LinesText {
  title: string;
  look: string;
  lookedAt: string;
}

/** With a chosen word, only its lines are strong. */
export function linesSvg(weights: Weights, chosen: Chosen | null, text: LinesText, width: number): SVGSVGElement {
  const column = Math.min(170, Math.floor(width * 0.38));
  const longest = Math.floor((column - 8) / LETTER);
  const height = TOP + STEP * Math.max(weights.queries.length, weights.keys.length) + 10;
  const { svg, add } = newDrawing(width, height);
  const isChosen = (line: Chosen["line"], index: number) =>
    chosen?.index === index && (!weights.cross || chosen.line === line);
  const middle = (index: number) => TOP + STEP * index + STEP / 2;
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", text.title);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  add("text", { x: column - 8, y: 16, "text-anchor": "end", "font-size": 12, fill: "var(--muted)" }, text.look);
  add("text", { x: width - column + 8, y: 16, "font-size": 12, fill: "var(--muted)" }, text.lookedAt);
  weights.queries.forEach((_, query) => {
    weights.keys.forEach((_, key) => {
      const weight = weightAt(weights, query, key);
      if (weight < FAINTEST) return;
      const [gives, gets] = [isChosen("query", query), isChosen("key", key)];
      const opacity = chosen && !gives && !gets ? weight * 0.12 : weight;
      const [from, to] = [column, width - column];
      const bend = (to - from) / 2;
      add("path", {
        d: `M${from},${middle(query)}C${from + bend},${middle(query)} ${to - bend},${middle(key)} ${to},${middle(key)}`,
        fill: "none",
        stroke: gets && !gives ? "var(--second)" : "var(--first)",
        "stroke-width": (0.6 + 2.4 * weight).toFixed(2),
        "stroke-opacity": Math.min(1, 0.08 + opacity * 0.92).toFixed(3),
      });
    });
  });
  const words = (line: Chosen["line"], tokens: string[], x: number, anchor: string) =>
    tokens.forEach((token, index) => {
      const whole = plainToken(token);
      const content = whole.length > longest ? `${whole.slice(0, longest - 1)}…` : whole;
      const weight = isChosen(line, index) ? 700 : 400;
      const placed = { x, y: middle(index), "dominant-baseline": "central", "text-anchor": anchor };
      add(
        "text",
        { ...placed, "font-size": 13, "font-weight": weight, fill: "var(--ink)", "unicode-bidi": "isolate" },
        content,
      );
    });
  words("query", weights.queries, column - 8, "end");
  words("key", weights.keys, width - column + 8, "start");
  return svg;
}
