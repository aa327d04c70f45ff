/** The words of a text, which scroll, to hover over and to choose from. */
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { WordLine } from "../parts/attention-words";
import { currentRoute, replaceQuery } from "../parts/router";
import { useViewLocale } from "./language";
import type { Span } from "./map/viewport";
import { axisOf, tokenAt, type AxisName, type TokenId, type Trace } from "./types";

const PART = 300; // words rendered at first, and added when they are scrolled to an end
const MOST = 3000; // words rendered at a time
const EDGE = 100; // pixels from the end at which words are added

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
  /** Words that are shown at first. */
  size: number;
  /** Words of the text. */
  total: number;
  show: (first: number) => void;
  /** Adds words before or after; those beyond the maximum are removed at the other end. */
  extend: (direction: "before" | "after") => void;
}

/** The rendered part of an axis, at first of `size` words, which follows the pinned word. */
export function usePart(trace: Trace, axisName: AxisName, { pinned }: ChosenWord, size = PART): Part {
  const total = axisOf(trace, axisName).tokens.length;
  const index = pinned?.axis === axisName ? pinned.index : null;
  const [span, setSpan] = useState<Span>([0, size]);
  const [first, end]: Span = span[0] < total ? [span[0], Math.min(total, span[1])] : [0, Math.min(total, size)];
  const show = (at: number) => setSpan([at, at + size]);
  useEffect(() => {
    if (index !== null && (index < first || index >= end)) show(Math.floor(index / size) * size);
  }, [index]);
  const extend: Part["extend"] = (direction) => {
    const before = Math.max(0, first - size);
    if (direction === "before") setSpan([before, Math.min(end, before + MOST)]);
    else setSpan([Math.max(first, end + size - MOST), end + size]);
  };
  return { span: [first, end], size, total, show, extend };
}

/** Buttons that move to another part of a text that is not shown as a whole. */
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
      <button type="button" disabled={end >= total} onClick={() => part.show(end)}>
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
  shade?: Float32Array | null;
  underline?: Float32Array | null;
}

/** Identifies an array: two views of the same numbers are equal. */
const viewOf = (array: Float32Array | null | undefined) => [array?.buffer, array?.byteOffset, array?.length];

export function TextWords({ trace, axisName, part, chosen, shade, underline }: TextWordsProps): JSX.Element {
  const { t } = useViewLocale();
  const { tokens } = axisOf(trace, axisName);
  const [first, end] = part.span;
  const idOf = (index: number | null) => (index === null ? null : { axis: axisName, index: first + index });
  const indexOf = (token: TokenId | null) =>
    token?.axis === axisName && token.index >= first && token.index < end ? token.index - first : null;
  const [shownIndex, pinnedIndex] = [indexOf(chosen.shown), indexOf(chosen.pinned)];
  const scrolling = useScrolling(part, pinnedIndex);
  // The words are not compared again while the map beside them moves.
  const words = useMemo(
    () => (
      <WordLine
        label={t(axisName === "text" ? "textLine" : "targetLine")}
        tokens={tokens.slice(first, end)}
        shade={shade ?? null}
        underline={underline ?? null}
        chosen={shownIndex}
        pinned={pinnedIndex}
        onChoose={(index) => chosen.pin(idOf(index))}
        onHover={(index) => chosen.hover(idOf(index))}
      />
    ),
    [t, axisName, tokens, first, end, ...viewOf(shade), ...viewOf(underline), shownIndex, pinnedIndex],
  );
  return (
    <div class="text-words" {...scrolling}>
      <PartChoice part={part} />
      {words}
    </div>
  );
}

/** Adds words when they are scrolled to an end, and scrolls to a word that is pinned elsewhere: in a link or a map. */
function useScrolling({ span: [first, end], total, extend }: Part, pinned: number | null) {
  const ref = useRef<HTMLDivElement>(null);
  const wordAt = (index: number) => ref.current?.querySelectorAll(".word")[index - first];
  /** A visible word and its position, which it keeps when words are added or removed before it. */
  const kept = useRef<{ index: number; top: number } | null>(null);
  const add = (direction: "before" | "after") => {
    const box = ref.current?.getBoundingClientRect();
    const words = [...(ref.current?.querySelectorAll(".word") ?? [])];
    const visible = words.findIndex((word) => word.getBoundingClientRect().bottom > (box?.top ?? 0));
    const word = words[visible];
    kept.current = word ? { index: first + visible, top: word.getBoundingClientRect().top } : null;
    extend(direction);
  };
  useLayoutEffect(() => {
    const box = ref.current;
    if (!box) return;
    const word = kept.current && wordAt(kept.current.index);
    if (word && kept.current) box.scrollTop += word.getBoundingClientRect().top - kept.current.top;
    kept.current = null;
    if (box.scrollHeight <= box.clientHeight && end < total) extend("after");
  }, [first, end]);
  const pinnedToken = pinned === null ? null : first + pinned;
  useLayoutEffect(() => {
    const [box, word] = [ref.current, pinnedToken === null ? null : wordAt(pinnedToken)];
    if (!box || !word) return;
    const [inner, outer] = [word.getBoundingClientRect(), box.getBoundingClientRect()];
    if (inner.top >= outer.top && inner.bottom <= outer.bottom) return;
    box.scrollTop += inner.top + inner.height / 2 - outer.top - outer.height / 2;
  }, [pinnedToken]);
  const onScroll = () => {
    const box = ref.current;
    if (!box || kept.current) return;
    if (box.scrollTop < EDGE && first > 0) add("before");
    else if (box.scrollTop + box.clientHeight > box.scrollHeight - EDGE && end < total) add("after");
  };
  return { ref, onScroll };
}
