/** Text inputs, with the progress of the model. */
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useViewLocale } from "./language";
import { useStore } from "./store";
import type { Progress, Slot, Trace } from "./types";

export function TextPanel(): JSX.Element {
  const store = useStore();
  const { t } = useViewLocale();
  const [second, setSecond] = useState(store.traces.B !== null);
  const toggle = () => {
    setSecond(!second);
    if (second) void store.close("B");
  };
  return (
    <section class="text-panel" aria-label={t("theText")}>
      <TextBox slot="A" label={second ? t("textSlot", { slot: "A" }) : t("theText")} />
      {second ? <TextBox slot="B" label={t("textSlot", { slot: "B" })} /> : null}
      <div class="second-text">
        <button type="button" class="quiet" onClick={toggle}>
          {t(second ? "closeSecond" : "secondText")}
        </button>
      </div>
    </section>
  );
}

function TextBox({ slot, label }: { slot: Slot; label: string }): JSX.Element {
  const store = useStore();
  const { t } = useViewLocale();
  const [text, setText] = useState(store.texts[slot]);
  const trace = store.traces[slot];
  const progress = store.busy.get(slot);
  const busy = progress !== undefined;
  const run = (event: Event) => {
    event.preventDefault();
    if (text.trim()) void store.run(slot, text);
  };
  const id = `text-${slot}`;
  return (
    <form class="text-box" onSubmit={run}>
      <label for={id}>{label}</label>
      <div class="text-and-button">
        <textarea
          id={id}
          rows={2}
          spellcheck={false}
          dir="auto"
          placeholder={t("placeholder")}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event);
          }}
        />
        {busy ? (
          <button type="button" onClick={() => store.stop()}>
            {t("stop")}
          </button>
        ) : (
          <button type="submit" class="strong" title={t("runShortcut")} disabled={!text.trim()}>
            {t("run")}
          </button>
        )}
      </div>
      <p class="text-state" role="status">
        {busy ? <RunProgress progress={progress} /> : trace ? <TraceFacts trace={trace} /> : null}
      </p>
    </form>
  );
}

function RunProgress({ progress }: { progress: Progress | null }): JSX.Element {
  const { t } = useViewLocale();
  const text = progress ? t("runProgress", { done: progress.done, total: progress.total }) : t("runStarts");
  return (
    <>
      <progress value={progress?.done} max={progress?.total} aria-label={text} /> {text}
    </>
  );
}

function TraceFacts({ trace }: { trace: Trace }): JSX.Element {
  const { t, number, count } = useViewLocale();
  const tokens = trace.text.tokens.length + (trace.target?.tokens.length ?? 0);
  const { cut } = trace;
  return (
    <>
      {t("runDone", { tokens: count(tokens), seconds: number(trace.seconds), bytes: number(trace.bytes / 1e6) })}
      {cut ? (
        <strong> {t("truncated", { total: count(cut.tokens_in_text), read: count(cut.tokens_read) })}</strong>
      ) : null}
    </>
  );
}
