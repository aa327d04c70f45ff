/** The heads that are switched off, and what changes in the output without them. */
import type { JSX } from "preact";
import { DifferenceTable } from "./difference";
import { useView } from "./language";
import { headName } from "./names";
import { SLOTS, useStore } from "./store";
import { headKey, headOf, type Reading } from "./types";

export function OffHeads(): JSX.Element {
  const store = useStore();
  const words = useView();
  const { say } = words;
  const heads = [...store.off].map(headOf);
  const readings = SLOTS.map((slot) => store.readings[slot]).filter((reading) => reading !== null);
  const waits = readings.some((reading) => store.waiting(reading).length > 0);
  return (
    <section class="off-heads">
      <h3>{say("offHeads")}</h3>
      {heads.length ? (
        <>
          <ul class="off-list">
            {heads.map((head) => {
              const name = headName(store.state, head, words);
              return (
                <li key={headKey(head)}>
                  <button
                    type="button"
                    aria-label={say("switchBack", { head: name })}
                    onClick={() => store.toggle(head)}
                  >
                    {name} <span aria-hidden="true">×</span>
                  </button>
                </li>
              );
            })}
          </ul>
          <div class="writing">
            <button type="button" onClick={() => void store.reset()}>
              {say("allOn")}
            </button>
            <button type="button" disabled={!waits || store.busy.size > 0} onClick={() => void store.readAgain()}>
              {say("readWithout")}
            </button>
          </div>
          {waits ? <p class="note">{say("readWithoutAbout")}</p> : null}
        </>
      ) : (
        <p class="note">{say("offNone")}</p>
      )}
      {readings.map((reading) => (
        <EffectOf key={reading.slot} reading={reading} />
      ))}
    </section>
  );
}

function EffectOf({ reading }: { reading: Reading }): JSX.Element {
  const store = useStore();
  const words = useView();
  const { say } = words;
  const effect = store.effects[reading.slot];
  const heads = words.list(reading.off.map((head) => headName(store.state, head, words)));
  return (
    <div class="effect" data-slot={reading.slot} role="status">
      {reading.off.length ? <p class="note">{say("wereOff", { slot: reading.slot, heads })}</p> : null}
      {store.waiting(reading).length ? (
        <>
          <h4>{say("effectOf", { slot: reading.slot })}</h4>
          {effect ? <DifferenceTable found={effect} /> : <p class="note">{say("effectComputing")}</p>}
        </>
      ) : null}
    </div>
  );
}
