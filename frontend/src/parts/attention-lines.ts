/** Attention as lines between two columns of words: queries on the left, keys on the right. */
import { weightAt, type Chosen, type Weights } from "./attention-words";
import { createSvg } from "./svg";
import { plainToken } from "./tokens";

const STEP = 20;
const TOP = 34;
const FAINTEST = 0.02;
const LETTER = 7.6; // approximate width at 13 px

export interface LinesText {
  title: string;
  queries: string;
  keys: string;
}

/** The lines of a chosen word are emphasised. */
export function linesSvg(weights: Weights, chosen: Chosen | null, text: LinesText, width: number): SVGSVGElement {
  const column = Math.min(170, Math.floor(width * 0.38));
  const longest = Math.floor((column - 8) / LETTER);
  const height = TOP + STEP * Math.max(weights.queries.length, weights.keys.length) + 10;
  const { svg, add } = createSvg(width, height);
  const isChosen = (line: Chosen["line"], index: number) =>
    chosen?.index === index && (!weights.cross || chosen.line === line);
  const middle = (index: number) => TOP + STEP * index + STEP / 2;
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", text.title);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  add("text", { x: column - 8, y: 16, "text-anchor": "end", "font-size": 12, fill: "var(--muted)" }, text.queries);
  add("text", { x: width - column + 8, y: 16, "font-size": 12, fill: "var(--muted)" }, text.keys);
  weights.queries.forEach((_, query) => {
    weights.keys.forEach((_, key) => {
      const weight = weightAt(weights, query, key);
      if (weight < FAINTEST) return;
      const [isQuery, isKey] = [isChosen("query", query), isChosen("key", key)];
      const opacity = chosen && !isQuery && !isKey ? weight * 0.12 : weight;
      const [from, to] = [column, width - column];
      const bend = (to - from) / 2;
      add("path", {
        d: `M${from},${middle(query)}C${from + bend},${middle(query)} ${to - bend},${middle(key)} ${to},${middle(key)}`,
        fill: "none",
        stroke: isKey && !isQuery ? "var(--second)" : "var(--first)",
        "stroke-width": (0.6 + 2.4 * weight).toFixed(2),
        "stroke-opacity": Math.min(1, 0.08 + opacity * 0.92).toFixed(3),
      });
    });
  });
  const addWords = (line: Chosen["line"], tokens: string[], x: number, anchor: string) =>
    tokens.forEach((token, index) => {
      const whole = plainToken(token);
      const content = whole.length > longest ? `${whole.slice(0, longest - 1)}…` : whole;
      const weight = isChosen(line, index) ? 700 : 400;
      const placed = { x, y: middle(index), "dominant-baseline": "central", "text-anchor": anchor };
      const style = { "font-size": 13, "font-weight": weight, fill: "var(--ink)", "unicode-bidi": "isolate" };
      add("text", { ...placed, ...style }, content);
    });
  addWords("query", weights.queries, column - 8, "end");
  addWords("key", weights.keys, width - column + 8, "start");
  return svg;
}
