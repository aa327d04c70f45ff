/** The first view: every head at once, the words to follow through them, and what the model says. */
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { plainToken } from "../parts/tokens";
import { cellMeaning, Grids } from "./grid";
import { useView } from "./language";
import { OutputPanel } from "./output";
import { SLOTS, useStore } from "./store";
import { TextWords, useChosen, usePart, type ChosenWord } from "./text-words";
import { axisOf, type AxisName, type Reading } from "./types";
import { useWord, type ChosenToken, type Side } from "./words";

export function Home(): JSX.Element {
  const store = useStore();
  const { say } = useView();
  const readings = SLOTS.map((slot) => store.readings[slot]).filter((reading) => reading !== null);
  const [switching, setSwitching] = useState(false);
  if (!readings.length) return <p class="lead empty">{say("nothingRead")}</p>;
  return (
    <div class="home">
      <section class="all-heads">
        <h2 tabIndex={-1}>{say("allHeads")}</h2>
        <p class="note">{say("gridAbout")}</p>
        <div class="controls">
          <span>{say("picking")}</span>
          <span class="segments" role="group" aria-label={say("picking")}>
            <button type="button" aria-pressed={!switching} onClick={() => setSwitching(false)}>
              {say("pickOpens")}
            </button>
            <button type="button" aria-pressed={switching} onClick={() => setSwitching(true)}>
              {say("pickSwitches")}
            </button>
          </span>
        </div>
        <div class={`texts count-${readings.length}`}>
          {readings.map((reading) => (
            <TextInHeads key={reading.slot} reading={reading} switching={switching} alone={readings.length === 1} />
          ))}
        </div>
      </section>
      <OutputPanel />
    </div>
  );
}

function TextInHeads(props: { reading: Reading; switching: boolean; alone: boolean }): JSX.Element {
  const { reading } = props;
  const store = useStore();
  const { say } = useView();
  const chosen = useChosen(reading);
  const [side, setSide] = useState<Side>("attends");
  const rows = useWord(reading, chosen.shown);
  const token = chosen.shown ? (axisOf(reading, chosen.shown.axis).tokens[chosen.shown.index] ?? "") : "";
  return (
    <section class="text-in-heads" data-slot={reading.slot} aria-label={say("textSlot", { slot: reading.slot })}>
      {props.alone ? null : <h3>{say("textSlot", { slot: reading.slot })}</h3>}
      <p class="note">{say("wordsAboutAll")}</p>
      <AxisWords reading={reading} axisName="text" chosen={chosen} />
      {reading.target ? <AxisWords reading={reading} axisName="target" chosen={chosen} /> : null}
      <div class="controls word-controls">
        <bdi class="word-name" aria-live="polite">
          {chosen.shown ? say("wordInHeads", { word: plainToken(token) }) : ""}
        </bdi>
        <span class="segments" role="group" aria-label={say("whichWay")}>
          <button type="button" aria-pressed={side === "attends"} onClick={() => setSide("attends")}>
            {say("looksAt")}
          </button>
          <button type="button" aria-pressed={side === "attended"} onClick={() => setSide("attended")}>
            {say("isSeenBy")}
          </button>
        </span>
      </div>
      <Grids
        reading={reading}
        word={rows ? { rows, side, token } : null}
        {...(props.switching ? { onPick: (head) => store.toggle(head) } : {})}
      />
      <PicturesNote reading={reading} />
    </section>
  );
}

function AxisWords(props: { reading: Reading; axisName: AxisName; chosen: ChosenWord }): JSX.Element {
  const { say } = useView();
  const axis = axisOf(props.reading, props.axisName);
  const { kept, keep, point, shown } = props.chosen;
  const mine = (token: ChosenToken | null) => (token?.axis === props.axisName ? token.index : null);
  const part = usePart(axis.tokens.length, mine(kept));
  return (
    <TextWords
      axis={axis}
      axisName={props.axisName}
      label={say(props.axisName === "text" ? "textLine" : "targetLine")}
      part={part}
      chosen={shown}
      kept={kept}
      onKeep={keep}
      onPoint={point}
    />
  );
}

/** How exact the pictures are, and how many are there. */
function PicturesNote({ reading }: { reading: Reading }): JSX.Element {
  const store = useStore();
  const words = useView();
  const { say, count } = words;
  const pictures = store.pictures.get(reading.id);
  const total = store.state.places.length;
  if (!pictures) return <p class="note" />;
  const { how } = pictures;
  return (
    <p class="note pictures-note" data-kind={how.kind} data-done={pictures.done}>
      {cellMeaning(pictures, words)}{" "}
      {how.rule ? `${say("gridEstimate", { every: count(how.rule.every), rows: count(how.rule.rows) })} ` : ""}
      {pictures.done ? "" : say("drawing", { done: pictures.places.size, total })}
    </p>
  );
}
