/** What the model says of a text, and going on writing it. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { plainToken, Token } from "../parts/tokens";
import { ask } from "./api";
import { DifferenceTable } from "./difference";
import { Grids } from "./grid";
import { useView } from "./language";
import { OffHeads } from "./off-heads";
import { SLOTS, useStore } from "./store";
import type { Difference, Reading, TokenOutput } from "./types";

const CANDIDATES = 8;

export function OutputPanel(): JSX.Element {
  const { say } = useView();
  const store = useStore();
  return (
    <aside class="output" aria-label={say("output")}>
      <h2>{say("output")}</h2>
      {SLOTS.map((slot) => {
        const reading = store.readings[slot];
        return reading ? (
          <OutputOf key={slot} reading={reading} alone={!store.readings.B || !store.readings.A} />
        ) : null;
      })}
      <OffHeads />
      {store.readings.A && store.readings.B ? <BetweenTexts one={store.readings.A} other={store.readings.B} /> : null}
    </aside>
  );
}

function OutputOf({ reading, alone }: { reading: Reading; alone: boolean }): JSX.Element {
  const { say } = useView();
  const { output } = reading;
  return (
    <section class="output-of">
      {alone ? null : <h3>{say("textSlot", { slot: reading.slot })}</h3>}
      {output.kind === "vector" ? (
        <p class="note">{say("vectorOutput", { size: output.size })}</p>
      ) : (
        <Candidates reading={reading} output={output} />
      )}
    </section>
  );
}

/** The likeliest tokens; where the model writes on, each is a button that writes it. */
function Candidates({ reading, output }: { reading: Reading; output: TokenOutput }): JSX.Element {
  const store = useStore();
  const { say, number } = useView();
  const writes = store.state.generates && reading.slot === "A";
  const title = output.kind === "next-token" ? say("nextToken") : say("maskedToken", { position: output.position });
  return (
    <>
      <h3>{title}</h3>
      {writes ? (
        <div class="writing">
          <button type="button" class="strong" disabled={store.busy.size > 0} onClick={() => void store.step()}>
            {say("writeNext")}
          </button>
          <button
            type="button"
            disabled={store.busy.size > 0 || reading.generated === 0}
            onClick={() => void store.back()}
          >
            {say("takeBack")}
          </button>
          {reading.generated ? <span class="muted">{say("writtenCount", { count: reading.generated })}</span> : null}
        </div>
      ) : null}
      {writes ? <p class="note">{say("chooseCandidate")}</p> : null}
      <ol class="candidates">
        {output.top.slice(0, CANDIDATES).map((candidate) => {
          const share = number(candidate.probability, "share");
          const bar = { width: `${(100 * (candidate.probability ?? 0)).toFixed(2)}%` };
          const content = (
            <>
              <span class="bar" style={bar} />
              <Token text={candidate.text} /> <span class="muted">{share}</span>
            </>
          );
          const label = say("candidate", { token: plainToken(candidate.text), share });
          return (
            <li key={candidate.id} data-token={candidate.id}>
              {writes ? (
                <button
                  type="button"
                  class="candidate"
                  aria-label={label}
                  disabled={store.busy.size > 0}
                  onClick={() => void store.step(candidate.id)}
                >
                  {content}
                </button>
              ) : (
                <span class="candidate">{content}</span>
              )}
            </li>
          );
        })}
      </ol>
      <p class="note">{say("entropyIs", { nats: say("inNats", { number: number(output.entropy) }) })}</p>
      {writes ? <NewestToken reading={reading} /> : null}
    </>
  );
}

/** Whom the token that was written last looks at, in every head. */
function NewestToken({ reading }: { reading: Reading }): JSX.Element | null {
  const { written } = useStore();
  const { say } = useView();
  if (!written || written.reading !== reading.id) return null;
  const rows = new Map(written.lines.map((line) => [line.place, line]));
  return (
    <section class="newest">
      <h3>
        <bdi>{say("writtenAbout", { token: plainToken(written.token.text) })}</bdi>
      </h3>
      <Grids reading={reading} word={{ rows, side: "attends", token: written.token.text }} onlyParts />
    </section>
  );
}

function BetweenTexts({ one, other }: { one: Reading; other: Reading }): JSX.Element {
  const store = useStore();
  const { say } = useView();
  const [found, setFound] = useState<Difference | null>(null);
  useEffect(() => {
    const controller = new AbortController();
    setFound(null);
    ask<Difference>("compare", { one: one.id, other: other.id }, controller.signal)
      .then(setFound)
      .catch((error) => store.fail(error));
    return () => controller.abort();
  }, [one.id, other.id]);
  return (
    <section class="between">
      <h3>{say("betweenTexts")}</h3>
      {found ? <DifferenceTable found={found} columns={["A", "B"]} /> : null}
    </section>
  );
}
