/** The words of a text, in parts, to hover over and to choose from. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { WordLine } from "../parts/attention-words";
import { currentRoute, replaceQuery } from "../parts/router";
import { useViewLocale } from "./language";
import type { Span } from "./map/viewport";
import { axisOf, tokenAt, type AxisName, type TokenId, type Trace } from "./types";

const PART = 2048; // words rendered at a time, which scroll

export interface ChosenWord {
  /** The hovered word, else the pinned one. */
  shown: TokenId | null;
  pinned: TokenId | null;
  pin: (token: TokenId | null) => void;
  hover: (token: TokenId | null) => void;
}

/** The chosen word of a text, if it still has that word. */
function useWord(trace: Trace | null, pinned: TokenId | null, pin: ChosenWord["pin"]): ChosenWord {
  const [hovered, hover] = useState<TokenId | null>(null);
  const existing = (token: TokenId | null) => (token && trace && tokenAt(trace, token) !== undefined ? token : null);
  return { shown: existing(hovered) ?? existing(pinned), pinned: existing(pinned), pin, hover };
}

export function useChosenWord(trace: Trace | null): ChosenWord {
  const [pinned, pin] = useState<TokenId | null>(null);
  return useWord(trace, pinned, pin);
}

/** The same with the pinned word in the link: `5`, or `t5` in the target. */
export function useLinkedWord(trace: Trace | null, link: string | undefined): ChosenWord {
  const match = /^(t?)(\d{1,9})$/.exec(link ?? "");
  const pinned: TokenId | null = match ? { axis: match[1] ? "target" : "text", index: Number(match[2]) } : null;
  return useWord(trace, pinned, (token) =>
    replaceQuery(currentRoute(), { word: token && `${token.axis === "target" ? "t" : ""}${token.index}` }),
  );
}

interface Part {
  span: Span;
  /** Words of a full part. */
  size: number;
  /** Words of the text. */
  total: number;
  show: (first: number) => void;
}

/** The rendered part of an axis, of at most `size` words, which follows the pinned word. */
export function usePart(trace: Trace, axisName: AxisName, { pinned }: ChosenWord, size = PART): Part {
  const count = axisOf(trace, axisName).tokens.length;
  const index = pinned?.axis === axisName ? pinned.index : null;
  const [start, show] = useState(0);
  const first = start < count ? start : 0;
  useEffect(() => {
    if (index !== null && (index < first || index >= first + size)) show(Math.floor(index / size) * size);
  }, [index]);
  return { span: [first, Math.min(count, first + size)], size, total: count, show };
}

/** Buttons that move to another part of a text that has several. */
export function PartChoice({ part }: { part: Part }): JSX.Element | null {
  const { t, count } = useViewLocale();
  const { size, total } = part;
  const [first, end] = part.span;
  if (total <= size) return null;
  return (
    <div class="text-parts" role="group" aria-label={t("partsOfText")}>
      <button type="button" disabled={first === 0} onClick={() => part.show(Math.max(0, first - size))}>
        {t("previousPart")}
      </button>
      <span>{t("partOfText", { first: count(first), last: count(end - 1), total: count(total) })}</span>
      <button type="button" disabled={end >= total} onClick={() => part.show(first + size)}>
        {t("nextPart")}
      </button>
    </div>
  );
}

interface TextWordsProps {
  trace: Trace;
  axisName: AxisName;
  part: Part;
  chosen: ChosenWord;
  /** Weights of the words of the part. */
  shade?: ArrayLike<number> | null;
  underline?: ArrayLike<number> | null;
}

export function TextWords({ trace, axisName, part, chosen, shade, underline }: TextWordsProps): JSX.Element {
  const { t } = useViewLocale();
  const { tokens } = axisOf(trace, axisName);
  const [first, end] = part.span;
  const idOf = (index: number | null) => (index === null ? null : { axis: axisName, index: first + index });
  const indexOf = (token: TokenId | null) =>
    token?.axis === axisName && token.index >= first && token.index < end ? token.index - first : null;
  return (
    <div class="text-words">
      <PartChoice part={part} />
      <WordLine
        label={t(axisName === "text" ? "textLine" : "targetLine")}
        tokens={tokens.slice(first, end)}
        shade={shade ?? null}
        underline={underline ?? null}
        chosen={indexOf(chosen.shown)}
        pinned={indexOf(chosen.pinned)}
        onChoose={(index) => chosen.pin(idOf(index))}
        onHover={(index) => chosen.hover(idOf(index))}
      />
    </div>
  );
}
