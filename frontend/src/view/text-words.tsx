/** The words of a text, a part at a time, to point at and to walk through. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { WordLine } from "../parts/attention-words";
import { changed, currentRoute, go } from "../parts/router";
import { Token } from "../parts/tokens";
import { useView } from "./language";
import type { Span } from "./map/viewport";
import type { ChosenToken, HeadRow } from "./words";
import { axisOf, type Axis, type AxisName, type Reading } from "./types";

export const PART = 300; // words drawn at once

interface Kept {
  token: ChosenToken | null;
  keep: (token: ChosenToken | null) => void;
}

export interface ChosenWord {
  shown: ChosenToken | null;
  kept: ChosenToken | null;
  keep: (token: ChosenToken | null) => void;
  point: (token: ChosenToken | null) => void;
}

/** A word that is pointed at is shown until the pointer leaves; one that was clicked stays, if the text still has it. */
function useChosenOf(reading: Reading | null, { token, keep }: Kept): ChosenWord {
  const [pointed, point] = useState<ChosenToken | null>(null);
  const stillThere = (one: ChosenToken | null) =>
    one && reading && one.index < axisOf(reading, one.axis).tokens.length ? one : null;
  const kept = stillThere(token);
  return { shown: stillThere(pointed) ?? kept, kept, keep, point };
}

export function useChosen(reading: Reading | null): ChosenWord {
  const [token, keep] = useState<ChosenToken | null>(null);
  return useChosenOf(reading, { token, keep });
}

/** The same, kept in the address: `5`, or `t5` of what was written. */
export function useChosenInLink(reading: Reading | null, link: string | undefined): ChosenWord {
  const match = /^(t?)(\d{1,9})$/.exec(link ?? "");
  const token: ChosenToken | null = match ? { axis: match[1] ? "target" : "text", index: Number(match[2]) } : null;
  const keep = (one: ChosenToken | null) =>
    go(changed(currentRoute(), { word: one && `${one.axis === "target" ? "t" : ""}${one.index}` }), true);
  return useChosenOf(reading, { token, keep });
}

/** The part of an axis that is drawn, and how one goes on; it follows the token that is chosen. */
export function usePart(count: number, chosen: number | null): { span: Span; turn: (first: number) => void } {
  const [first, turn] = useState(0);
  const within = first < count ? first : 0;
  useEffect(() => {
    if (chosen !== null && (chosen < within || chosen >= within + PART)) turn(Math.floor(chosen / PART) * PART);
  }, [chosen]);
  return { span: [within, Math.min(count, within + PART)], turn };
}

interface TextWordsProps {
  axis: Axis;
  axisName: AxisName;
  label: string;
  part: ReturnType<typeof usePart>;
  /** Of the part that is drawn. */
  shade?: ArrayLike<number> | null;
  underline?: ArrayLike<number> | null;
  chosen: ChosenToken | null;
  kept: ChosenToken | null;
  onKeep: (token: ChosenToken | null) => void;
  onPoint: (token: ChosenToken | null) => void;
}

export function TextWords(props: TextWordsProps): JSX.Element {
  const { axis, axisName, part, chosen } = props;
  const { say, count } = useView();
  const [first, end] = part.span;
  const total = axis.tokens.length;
  const tokenAt = (index: number | null) => (index === null ? null : { axis: axisName, index: first + index });
  const here = (token: ChosenToken | null) =>
    token?.axis === axisName && token.index >= first && token.index < end ? token.index - first : null;
  return (
    <div class="text-words">
      {total > PART ? (
        <div class="text-parts" role="group" aria-label={say("pagesOfText")}>
          <button type="button" disabled={first === 0} onClick={() => part.turn(Math.max(0, first - PART))}>
            {say("earlier")}
          </button>
          <span>{say("tokensFromTo", { first: count(first), last: count(end - 1), total: count(total) })}</span>
          <button type="button" disabled={end >= total} onClick={() => part.turn(first + PART)}>
            {say("later")}
          </button>
        </div>
      ) : null}
      <WordLine
        label={props.label}
        tokens={axis.tokens.slice(first, end)}
        shade={props.shade ? Array.from(props.shade) : null}
        underline={props.underline ? Array.from(props.underline) : null}
        chosen={here(chosen)}
        kept={here(props.kept)}
        onChoose={(index) => props.onKeep(tokenAt(index))}
        onPoint={(index) => props.onPoint(tokenAt(index))}
      />
    </div>
  );
}

/** The strongest tokens of a row, with their numbers. */
export function TopTokens(props: {
  title: string;
  row: HeadRow;
  axis: Axis;
  kind: "shade" | "underline";
}): JSX.Element {
  const { say, number, count } = useView();
  const long = props.axis.tokens.length > PART;
  const shown = props.row.top.filter(({ weight }) => weight >= 0.0005);
  return (
    <div>
      <h4 class={`strongest-${props.kind}`}>
        <bdi>{props.title}</bdi>
      </h4>
      {shown.length ? (
        <ol>
          {shown.map(({ token, weight }, place) => (
            <li key={place} data-token={token} data-weight={weight}>
              <Token text={props.axis.tokens[token] ?? ""} />{" "}
              <span class="muted">
                {number(weight, "share")}
                {long ? <span title={say("tokenNumber", { number: count(token) })}> · {count(token)}</span> : null}
              </span>
            </li>
          ))}
        </ol>
      ) : (
        <p class="muted">{say("nobody")}</p>
      )}
    </div>
  );
}
