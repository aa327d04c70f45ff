/** Attention as lines between two columns of words: queries on the left, keys on the right. */
import type { JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { hasNaN } from "../data";
import { weightAt, type Chosen, type Weights } from "./attention-words";
import { Segments } from "./controls";
import { useLocale } from "./language";
import { createSvg } from "./svg";
import { plainToken } from "./tokens";

const STEP = 20;
const TOP = 34;
const FAINTEST = 0.02;
const LETTER = 7.6; // approximate width at 13 px
/** Width of the lines in a file, and at most on the screen. */
export const LINES_WIDTH = 560;

export interface LinesText {
  title: string;
  queries: string;
  keys: string;
  /** Written instead of the lines if a weight is not a number. */
  notANumber: string;
}

/** The vertical middle of a word. */
const middle = (index: number) => TOP + STEP * index + STEP / 2;

/** The lines of a chosen word are emphasised. */
export function linesSvg(weights: Weights, chosen: Chosen | null, text: LinesText, width: number): SVGSVGElement {
  const column = Math.min(170, Math.floor(width * 0.38));
  const longest = Math.floor((column - 8) / LETTER);
  const height = TOP + STEP * Math.max(weights.queries.length, weights.keys.length) + 10;
  const { svg, add } = createSvg(width, height);
  const isChosen = (line: Chosen["line"], index: number) =>
    chosen?.index === index && (!weights.cross || chosen.line === line);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", text.title);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  add("text", { x: column - 8, y: 16, "text-anchor": "end", "font-size": 12, fill: "var(--muted)" }, text.queries);
  add("text", { x: width - column + 8, y: 16, "font-size": 12, fill: "var(--muted)" }, text.keys);
  if (hasNaN(weights.values)) {
    add("text", { x: width / 2, y: 16, "text-anchor": "middle", "font-size": 12, fill: "var(--ink)" }, text.notANumber);
  }
  weights.queries.forEach((_, query) => {
    weights.keys.forEach((_, key) => {
      const weight = weightAt(weights, query, key);
      if (!(weight >= FAINTEST)) return;
      const [isQuery, isKey] = [isChosen("query", query), isChosen("key", key)];
      const [faintest, added] = !chosen ? [0.08, 0.92] : isQuery || isKey ? [0.25, 0.75] : [0.03, 0.1];
      const [from, to] = [column, width - column];
      const bend = (to - from) / 2;
      add("path", {
        d: `M${from},${middle(query)}C${from + bend},${middle(query)} ${to - bend},${middle(key)} ${to},${middle(key)}`,
        fill: "none",
        stroke: isKey && !isQuery ? "var(--second)" : "var(--first)",
        "stroke-width": (0.6 + 2.4 * weight).toFixed(2),
        "stroke-opacity": Math.min(1, faintest + weight * added).toFixed(3),
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

interface LinesProps {
  weights: Weights;
  chosen: Chosen | null;
  text: LinesText;
}

/** The lines on the screen; where they scroll, the chosen word is scrolled into view. */
export function Lines({ weights, chosen, text }: LinesProps): JSX.Element {
  const container = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const host = container.current;
    if (!host) return;
    host.replaceChildren(linesSvg(weights, chosen, text, Math.min(LINES_WIDTH, host.clientWidth)));
    if (!chosen) return;
    const y = middle(chosen.index);
    if (y < host.scrollTop + STEP || y > host.scrollTop + host.clientHeight - STEP) {
      host.scrollTop = y - host.clientHeight / 2;
    }
  }, [weights, chosen?.line, chosen?.index, text.title, text.queries]);
  return <div class="chart lines" ref={container} tabIndex={0} role="region" aria-label={text.title} />;
}

/** The choice between words alone, and words with lines. */
export function LinesChoice(props: { lines: boolean; onChange: (lines: boolean) => void }): JSX.Element {
  const { t } = useLocale();
  const drawings = [
    [false, t("asWords")],
    [true, t("asLines")],
  ] as const;
  return <Segments label={t("drawAs")} options={drawings} value={props.lines} onChange={props.onChange} />;
}
