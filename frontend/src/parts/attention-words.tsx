/** Attention drawn on the words of a sentence: choose a word and see whom it looks at, and who looks at it. */
import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { inkOn, scaleOf } from "./colour";
import { useWords } from "./language";
import { useDark } from "./theme";
import { plainToken, Token } from "./tokens";

/** One head's weights, [queries, keys], row by row. */
export interface Weights {
  queries: string[];
  keys: string[];
  values: ArrayLike<number>;
  /** Whether the keys are words of another text than the queries; they then stand in a line of their own. */
  cross: boolean;
}

/** Which word is chosen: of a self-attention there is one line of words, of a cross-attention there are two. */
export interface Chosen {
  line: "query" | "key";
  index: number;
}

const STRONGEST = 5;
const FAINTEST = 0.005;

export function weightAt(weights: Weights, query: number, key: number): number {
  return weights.values[query * weights.keys.length + key] ?? 0;
}

/** What a word gives to every key, or gets from every query. */
export function given(weights: Weights, query: number): number[] {
  return weights.keys.map((_, key) => weightAt(weights, query, key));
}

export function received(weights: Weights, key: number): number[] {
  return weights.queries.map((_, query) => weightAt(weights, query, key));
}

function averageReceived(weights: Weights): number[] {
  const count = Math.max(1, weights.queries.length);
  return weights.keys.map((_, key) => received(weights, key).reduce((sum, x) => sum + x, 0) / count);
}

interface AttentionWordsProps {
  weights: Weights;
  chosen: Chosen | null;
  onChoose: (chosen: Chosen | null) => void;
  label: string;
}

export function AttentionWords({ weights, chosen, onChoose, label }: AttentionWordsProps): JSX.Element {
  const { say } = useWords();
  const one = !weights.cross;
  const asQuery = chosen && (one || chosen.line === "query") ? given(weights, chosen.index) : null;
  const asKey = chosen && (one || chosen.line === "key") ? received(weights, chosen.index) : null;
  const average = chosen ? null : averageReceived(weights);
  return (
    <div class="attention-words">
      <div>
        {one ? (
          <WordLine
            label={label}
            tokens={weights.keys}
            shade={asQuery ?? average}
            underline={asKey}
            chosen={chosen?.index ?? null}
            onChoose={(index) => onChoose(index === null ? null : { line: "query", index })}
          />
        ) : (
          <>
            <p class="line-name">{say("theseLook")}</p>
            <WordLine
              label={`${label}: ${say("theseLook")}`}
              tokens={weights.queries}
              shade={null}
              underline={asKey}
              chosen={chosen?.line === "query" ? chosen.index : null}
              onChoose={(index) => onChoose(index === null ? null : { line: "query", index })}
            />
            <p class="line-name">{say("theseAreLookedAt")}</p>
            <WordLine
              label={`${label}: ${say("theseAreLookedAt")}`}
              tokens={weights.keys}
              shade={asQuery ?? average}
              underline={null}
              chosen={chosen?.line === "key" ? chosen.index : null}
              onChoose={(index) => onChoose(index === null ? null : { line: "key", index })}
            />
          </>
        )}
      </div>
      <Strongest weights={weights} chosen={chosen} given={asQuery} received={asKey} average={average} />
    </div>
  );
}

interface WordLineProps {
  label: string;
  tokens: string[];
  /** Colours the words. */
  shade: number[] | null;
  /** Draws a bar under the words. */
  underline: number[] | null;
  chosen: number | null;
  onChoose: (index: number | null) => void;
  /** The chosen word that stays when the pointer leaves, where pointing chooses too. */
  kept?: number | null;
  onPoint?: (index: number | null) => void;
}

export function WordLine({
  label,
  tokens,
  shade,
  underline,
  chosen,
  onChoose,
  kept = chosen,
  onPoint,
}: WordLineProps): JSX.Element {
  const dark = useDark();
  const place = useRef<HTMLDivElement>(null);
  const [at, setAt] = useState(0);
  // Small weights are seen better under a square root; the list below has the numbers.
  const scale = scaleOf(0, 1, dark, 0.6);
  const walk = (event: KeyboardEvent, index: number) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    const next = event.key === "Home" ? 0 : event.key === "End" ? tokens.length - 1 : index + step;
    if (event.key === "Escape") onChoose(null);
    if (next === index || next < 0 || next >= tokens.length) return;
    event.preventDefault();
    place.current?.querySelectorAll<HTMLButtonElement>("button")[next]?.focus();
  };
  return (
    <div class="word-line" role="group" aria-label={label} ref={place} onMouseLeave={onPoint && (() => onPoint(null))}>
      {tokens.map((token, index) => {
        const weight = shade?.[index] ?? 0;
        const colour = weight >= FAINTEST ? scale.of(weight) : null;
        const bar = underline?.[index] ?? 0;
        return (
          <button
            type="button"
            key={index}
            class="word"
            tabIndex={index === at ? 0 : -1}
            aria-pressed={chosen === index}
            style={{
              background: colour ?? "transparent",
              color: colour ? inkOn(colour) : "inherit",
              boxShadow: bar >= FAINTEST ? `0 ${(1 + 6 * Math.sqrt(bar)).toFixed(1)}px 0 0 var(--second)` : "none",
            }}
            onFocus={(event) => {
              setAt(index);
              // A click focuses too, and then toggles by itself.
              if (event.currentTarget.matches(":focus-visible")) onChoose(index);
            }}
            onMouseEnter={onPoint && (() => onPoint(index))}
            onClick={() => onChoose(kept === index ? null : index)}
            onKeyDown={(event) => walk(event, index)}
          >
            <Token text={token} />
          </button>
        );
      })}
    </div>
  );
}

interface StrongestProps {
  weights: Weights;
  chosen: Chosen | null;
  given: number[] | null;
  received: number[] | null;
  average: number[] | null;
}

function Strongest({ weights, chosen, given, received, average }: StrongestProps): JSX.Element {
  const { say } = useWords();
  const tokens = chosen?.line === "key" ? weights.keys : weights.queries;
  const word = chosen ? plainToken(tokens[chosen.index] ?? "") : "";
  return (
    <div class="strongest" aria-live="polite">
      {average ? (
        <StrongestList title={say("lookedAtOnAverage")} tokens={weights.keys} shares={average} kind="shade" />
      ) : null}
      {given ? (
        <StrongestList title={say("wordLooksAt", { word })} tokens={weights.keys} shares={given} kind="shade" />
      ) : null}
      {received ? (
        <StrongestList
          title={say("wordSeenBy", { word })}
          tokens={weights.queries}
          shares={received}
          kind="underline"
        />
      ) : null}
    </div>
  );
}

function StrongestList(props: { title: string; tokens: string[]; shares: number[]; kind: string }): JSX.Element {
  const { say, number } = useWords();
  const order = props.shares
    .map((share, index) => ({ share, index }))
    .sort((one, other) => other.share - one.share)
    .slice(0, STRONGEST)
    .filter(({ share }) => share >= FAINTEST);
  return (
    <div>
      <h4 class={`strongest-${props.kind}`}>
        <bdi>{props.title}</bdi>
      </h4>
      {order.length ? (
        <ol>
          {order.map(({ share, index }, place) => (
            <li key={place}>
              <Token text={props.tokens[index] ?? ""} /> <span class="muted">{number(share, "share")}</span>
            </li>
          ))}
        </ol>
      ) : (
        <p class="muted">{say("nobody")}</p>
      )}
    </div>
  );
}
