/** Where texts are typed, and how far the model is with reading them. */
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useView } from "./language";
import { useStore } from "./store";
import type { Reading, Slot } from "./types";

export function AskPanel(): JSX.Element {
  const store = useStore();
  const { say } = useView();
  const [second, setSecond] = useState(store.readings.B !== null);
  return (
    <section class="ask" aria-label={say("theText")}>
      <TextBox slot="A" alone={!second} />
      {second ? <TextBox slot="B" alone={false} /> : null}
      <div class="ask-more">
        {second ? (
          <button
            type="button"
            class="quiet"
            onClick={() => {
              setSecond(false);
              void store.close("B");
            }}
          >
            {say("closeSecond")}
          </button>
        ) : (
          <button type="button" class="quiet" onClick={() => setSecond(true)}>
            {say("secondText")}
          </button>
        )}
      </div>
    </section>
  );
}

function TextBox({ slot, alone }: { slot: Slot; alone: boolean }): JSX.Element {
  const store = useStore();
  const { say } = useView();
  const [text, setText] = useState(store.texts[slot]);
  const reading = store.readings[slot];
  const busy = store.busy.has(slot);
  const progress = store.busy.get(slot);
  const read = () => {
    if (text.trim()) void store.read(slot, text);
  };
  const id = `text-${slot}`;
  return (
    <form
      class="text-box"
      onSubmit={(event) => {
        event.preventDefault();
        read();
      }}
    >
      <label for={id}>{alone ? say("theText") : say("textSlot", { slot })}</label>
      <div class="text-and-button">
        <textarea
          id={id}
          rows={2}
          spellcheck={false}
          dir="auto"
          placeholder={say("placeholder")}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
              event.preventDefault();
              read();
            }
          }}
        />
        {busy ? (
          <button type="button" onClick={() => store.stop()}>
            {say("stopReading")}
          </button>
        ) : (
          <button type="submit" class="strong" title={say("keysToRead")} disabled={!text.trim()}>
            {say("readIt")}
          </button>
        )}
      </div>
      <p class="text-state" role="status">
        {busy ? <ReadingProgress done={progress?.done} total={progress?.total} /> : null}
        {!busy && reading ? <ReadingFacts reading={reading} /> : null}
      </p>
    </form>
  );
}

function ReadingProgress({ done, total }: { done?: number | undefined; total?: number | undefined }): JSX.Element {
  const { say } = useView();
  const text = done === undefined || total === undefined ? say("readStarts") : say("readProgress", { done, total });
  return (
    <>
      <progress value={done} max={total} aria-label={text} /> {text}
    </>
  );
}

function ReadingFacts({ reading }: { reading: Reading }): JSX.Element {
  const { say, number, count } = useView();
  const tokens = reading.text.tokens.length + (reading.target?.tokens.length ?? 0);
  const facts = { tokens: count(tokens), seconds: number(reading.seconds), bytes: number(reading.bytes / 1e6) };
  return (
    <>
      {say("readDone", facts)}
      {reading.cut ? (
        <strong>
          {" "}
          {say("readCut", { total: count(reading.cut.tokens_in_text), read: count(reading.cut.tokens_read) })}
        </strong>
      ) : null}
    </>
  );
}
