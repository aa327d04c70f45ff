/** Attention of one head between words of a text: choose a word to see what it attends to, and what attends to it. */
import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { hasNaN } from "../data";
import { scaleOf, textColourOn } from "./colour";
import { useLocale } from "./language";
import { useDark } from "./theme";
import { plainToken, Token } from "./tokens";

/** Attention weights of one head: `values` are [queries, keys], row by row. */
export interface Weights {
  queries: string[];
  keys: string[];
  values: ArrayLike<number>;
  /** True if queries and keys are words of different texts, shown as two lines. */
  cross: boolean;
}

/** The chosen word. Cross-attention has two lines of words, self-attention one, in which a word is query and key. */
export interface Chosen {
  line: "query" | "key";
  index: number;
}

const TOP = 5;
const LEAST = 0.005; // smaller weights are neither drawn nor listed

export function weightAt(weights: Weights, query: number, key: number): number {
  return weights.values[query * weights.keys.length + key] ?? 0;
}

/** The attention that each key receives, averaged over the queries. */
function averageReceived(weights: Weights): number[] {
  const { queries, keys } = weights;
  const sums = keys.map((_, key) => queries.reduce((sum, _, query) => sum + weightAt(weights, query, key), 0));
  return sums.map((sum) => sum / Math.max(1, queries.length));
}

interface AttentionWordsProps {
  weights: Weights;
  chosen: Chosen | null;
  onChoose: (chosen: Chosen | null) => void;
  label: string;
}

export function AttentionWords({ weights, chosen, onChoose, label }: AttentionWordsProps): JSX.Element {
  const { t } = useLocale();
  const { queries, keys, cross } = weights;
  const index = chosen?.index ?? 0;
  const isChosen = (line: Chosen["line"]) => chosen !== null && (!cross || chosen.line === line);
  /** Weights from the chosen word to every key. */
  const attendsTo = isChosen("query") ? keys.map((_, key) => weightAt(weights, index, key)) : null;
  /** Weights from every query to the chosen word. */
  const attendedBy = isChosen("key") ? queries.map((_, query) => weightAt(weights, query, index)) : null;
  const average = chosen ? null : averageReceived(weights);
  const word = chosen ? plainToken((chosen.line === "key" ? keys : queries)[index] ?? "") : "";
  const lineOf = (line: Chosen["line"], name: string, shade: number[] | null, underline: number[] | null) => (
    <WordLine
      label={name}
      tokens={line === "key" ? keys : queries}
      shade={shade}
      underline={underline}
      chosen={isChosen(line) ? index : null}
      onChoose={(next) => onChoose(next === null ? null : { line, index: next })}
    />
  );
  return (
    <div class="attention-words">
      <div>
        {cross ? (
          <>
            <p class="line-name">{t("queries")}</p>
            {lineOf("query", `${label}: ${t("queries")}`, null, attendedBy)}
            <p class="line-name">{t("keys")}</p>
            {lineOf("key", `${label}: ${t("keys")}`, attendsTo ?? average, null)}
          </>
        ) : (
          lineOf("query", label, attendsTo ?? average, attendedBy)
        )}
      </div>
      <div class="strongest" aria-live="polite">
        {average ? <TopTokens title={t("mostAttended")} tokens={keys} top={topOf(average)} kind="shade" /> : null}
        {attendsTo ? (
          <TopTokens title={t("wordAttendsTo", { word })} tokens={keys} top={topOf(attendsTo)} kind="shade" />
        ) : null}
        {attendedBy ? (
          <TopTokens title={t("wordAttendedBy", { word })} tokens={queries} top={topOf(attendedBy)} kind="underline" />
        ) : null}
      </div>
    </div>
  );
}

interface WordLineProps {
  label: string;
  tokens: string[];
  /** Weights that colour the words. */
  shade: ArrayLike<number> | null;
  /** Weights drawn as bars under the words. */
  underline: ArrayLike<number> | null;
  chosen: number | null;
  onChoose: (index: number | null) => void;
  /** Where hovering chooses words as well: the word that remains chosen when the pointer leaves. */
  pinned?: number | null;
  onHover?: (index: number | null) => void;
}

export function WordLine(props: WordLineProps): JSX.Element {
  const { label, tokens, shade, underline, chosen, onChoose, pinned = chosen, onHover } = props;
  const dark = useDark();
  const container = useRef<HTMLDivElement>(null);
  const [focus, setFocus] = useState(0);
  const scale = scaleOf(0, 1, dark, 0.6);
  const moveFocus = (event: KeyboardEvent, index: number) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    const next = event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : index + step;
    if (event.key === "Escape") onChoose(null);
    if (next === index || next < 0 || next >= tokens.length) return;
    event.preventDefault();
    container.current?.querySelectorAll<HTMLButtonElement>("button")[next]?.focus();
  };
  const onMouseLeave = onHover && (() => onHover(null));
  return (
    <div class="word-line" role="group" aria-label={label} ref={container} onMouseLeave={onMouseLeave}>
      {tokens.map((token, index) => {
        const weight = shade?.[index] ?? 0;
        const missing = Number.isNaN(weight) || Number.isNaN(underline?.[index]);
        const colour = weight >= LEAST ? scale.of(weight) : null;
        const bar = underline?.[index] ?? 0;
        return (
          <button
            type="button"
            key={index}
            class={missing ? "word missing" : "word"}
            tabIndex={index === focus ? 0 : -1}
            aria-pressed={chosen === index}
            style={{
              background: colour ?? (missing ? undefined : "transparent"),
              color: colour ? textColourOn(colour) : "inherit",
              boxShadow: bar >= LEAST ? `0 ${(1 + 6 * Math.sqrt(bar)).toFixed(1)}px 0 0 var(--second)` : "none",
            }}
            onFocus={(event) => {
              setFocus(index);
              // A click focuses as well, and toggles in onClick.
              if (event.currentTarget.matches(":focus-visible")) onChoose(index);
            }}
            onMouseEnter={onHover && (() => onHover(index))}
            onClick={() => onChoose(pinned === index ? null : index)}
            onKeyDown={(event) => moveFocus(event, index)}
          >
            <Token text={token} />
          </button>
        );
      })}
    </div>
  );
}

export interface TopToken {
  token: number;
  weight: number;
}

/** The tokens with the largest weights, sorted, after those whose weight is not a number. */
export function topOf(weights: ArrayLike<number>, count = TOP): TopToken[] {
  const all = Array.from(weights, (weight, token) => ({ token, weight }));
  const rank = ({ weight }: TopToken) => (Number.isNaN(weight) ? Number.MAX_VALUE : weight);
  return all.sort((one, other) => rank(other) - rank(one)).slice(0, count);
}

interface TopTokensProps {
  title: string;
  tokens: string[];
  top: TopToken[];
  kind: "shade" | "underline";
  /** Smaller weights are not listed. */
  least?: number;
  /** Adds the position of each token. */
  numbered?: boolean;
}

export function TopTokens({ title, tokens, top, kind, least = LEAST, numbered }: TopTokensProps): JSX.Element {
  const { t, number, count } = useLocale();
  const isMissing = hasNaN(top.map(({ weight }) => weight));
  const listed = isMissing ? [] : top.filter(({ weight }) => weight >= least);
  return (
    <div>
      <h4 class={`strongest-${kind}`}>
        <bdi>{title}</bdi>
      </h4>
      {listed.length ? (
        <ol>
          {listed.map(({ token, weight }) => (
            <li key={token} data-token={token} data-weight={weight}>
              <Token text={tokens[token] ?? ""} />{" "}
              <span class="muted">
                {number(weight, "share")}
                {numbered ? <span title={t("tokenNumber", { number: count(token) })}> · {count(token)}</span> : null}
              </span>
            </li>
          ))}
        </ol>
      ) : (
        <p class="muted">{isMissing ? t("notANumber") : t("noneAbove", { share: `${100 * least}%` })}</p>
      )}
    </div>
  );
}
