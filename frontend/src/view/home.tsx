/** Home view: all heads, the words to follow through them, and the output. */
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { Segments } from "../parts/controls";
import { plainToken } from "../parts/tokens";
import { cellMeaning, Grids } from "./grid";
import { useViewLocale } from "./language";
import { OutputPanel } from "./output";
import { useStore } from "./store";
import { TextWords, useChosenWord, usePart, type ChosenWord } from "./text-words";
import { useTokenRows, type Side } from "./token-rows";
import { tokenAt, type AxisName, type Trace } from "./types";

export function Home(): JSX.Element {
  const { loaded } = useStore();
  const { t } = useViewLocale();
  const [ablating, setAblating] = useState(false);
  if (!loaded.length) return <p class="lead empty">{t("noText")}</p>;
  const actions = [
    [false, t("clickOpens")],
    [true, t("clickAblates")],
  ] as const;
  return (
    <div class="home">
      <section class="all-heads">
        <h2 tabIndex={-1}>{t("allHeads")}</h2>
        <p class="note">{t("gridAbout")}</p>
        <div class="controls">
          <span>{t("clickAction")}</span>
          <Segments label={t("clickAction")} options={actions} value={ablating} onChange={setAblating} />
        </div>
        <div class={`texts count-${loaded.length}`}>
          {loaded.map((trace) => (
            <TextInHeads key={trace.slot} trace={trace} ablating={ablating} alone={loaded.length === 1} />
          ))}
        </div>
      </section>
      <OutputPanel />
    </div>
  );
}

function TextInHeads(props: { trace: Trace; ablating: boolean; alone: boolean }): JSX.Element {
  const { trace } = props;
  const store = useStore();
  const { t } = useViewLocale();
  const chosen = useChosenWord(trace);
  const [side, setSide] = useState<Side>("attends");
  const rows = useTokenRows(trace, chosen.shown);
  const token = (chosen.shown && tokenAt(trace, chosen.shown)) ?? "";
  const name = t("textSlot", { slot: trace.slot });
  const sides = [
    ["attends", t("attendsTo")],
    ["attended", t("attendedBy")],
  ] as const;
  return (
    <section class="text-in-heads" data-slot={trace.slot} aria-label={name}>
      {props.alone ? null : <h3>{name}</h3>}
      <p class="note">{t("wordsAboutAll")}</p>
      <AxisWords trace={trace} axisName="text" chosen={chosen} />
      {trace.target ? <AxisWords trace={trace} axisName="target" chosen={chosen} /> : null}
      <div class="controls word-controls">
        <bdi class="word-name" aria-live="polite">
          {chosen.shown ? t("wordInHeads", { word: plainToken(token) }) : ""}
        </bdi>
        <Segments<Side> label={t("whichWay")} options={sides} value={side} onChange={setSide} />
      </div>
      <Grids
        trace={trace}
        word={rows ? { rows, side, token } : null}
        {...(props.ablating ? { onPick: (head) => store.toggle(head) } : {})}
      />
      <PicturesNote trace={trace} />
    </section>
  );
}

function AxisWords(props: { trace: Trace; axisName: AxisName; chosen: ChosenWord }): JSX.Element {
  return <TextWords {...props} part={usePart(props.trace, props.axisName, props.chosen)} />;
}

/** The precision of the maps, and the progress of drawing them. */
function PicturesNote({ trace }: { trace: Trace }): JSX.Element {
  const store = useStore();
  const locale = useViewLocale();
  const { t, count } = locale;
  const pictures = store.pictures.get(trace.id);
  if (!pictures) return <p class="note" />;
  const { kind, rule } = pictures.precision;
  return (
    <p class="note pictures-note" data-kind={kind} data-done={pictures.done}>
      {cellMeaning(pictures, locale)}{" "}
      {rule ? `${t("gridEstimate", { every: count(rule.every), rows: count(rule.rows) })} ` : ""}
      {pictures.done ? "" : t("drawing", { done: pictures.layers.size, total: store.state.layers.length })}
    </p>
  );
}
