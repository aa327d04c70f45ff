/** The output of the model for a text, and generation. */
import type { JSX } from "preact";
import { plainToken, Token } from "../parts/tokens";
import { AblatedHeads } from "./ablated-heads";
import { DifferenceTable } from "./difference";
import { Grids } from "./grid";
import { useViewLocale } from "./language";
import { useRequest, useStore } from "./store";
import type { Difference, TokenOutput, Trace } from "./types";

const CANDIDATES = 8;

export function OutputPanel(): JSX.Element {
  const { t } = useViewLocale();
  const { loaded } = useStore();
  const [one, other] = loaded;
  return (
    <aside class="output" aria-label={t("output")}>
      <h2>{t("output")}</h2>
      {loaded.map((trace) => (
        <section key={trace.slot} class="output-of">
          {other ? <h3>{t("textSlot", { slot: trace.slot })}</h3> : null}
          {trace.output.kind === "vector" ? (
            <p class="note">{t("vectorOutput", { size: trace.output.size })}</p>
          ) : (
            <Candidates trace={trace} output={trace.output} />
          )}
        </section>
      ))}
      <AblatedHeads />
      {one && other ? <TextDifference one={one} other={other} /> : null}
    </aside>
  );
}

/** The most likely tokens; buttons that append one if the model generates. */
function Candidates({ trace, output }: { trace: Trace; output: TokenOutput }): JSX.Element {
  const store = useStore();
  const { t, number } = useViewLocale();
  const generates = store.state.generates && trace.slot === "A";
  const busy = store.busy.size > 0;
  const { generated } = trace;
  return (
    <>
      <h3>{output.kind === "next-token" ? t("nextToken") : t("maskedToken", { position: output.position })}</h3>
      {generates ? (
        <>
          <div class="buttons">
            <button type="button" class="strong" disabled={busy} onClick={() => void store.step()}>
              {t("appendMostLikely")}
            </button>
            <button type="button" disabled={busy || generated === 0} onClick={() => void store.undo()}>
              {t("undo")}
            </button>
            {generated ? <span class="muted">{t("generatedCount", { count: generated })}</span> : null}
          </div>
          <p class="note">{t("appendOneOf")}</p>
        </>
      ) : null}
      <ol class="plain candidates">
        {output.top.slice(0, CANDIDATES).map(({ id, text, probability }) => {
          const share = number(probability, "share");
          const label = t("candidate", { token: plainToken(text), share });
          const content = (
            <>
              <span class="bar" style={{ width: `${(100 * (probability ?? 0)).toFixed(2)}%` }} />
              <Token text={text} /> <span class="muted">{share}</span>
            </>
          );
          const append = () => void store.step(id);
          return (
            <li key={id} data-token={id}>
              {generates ? (
                <button type="button" class="candidate" aria-label={label} disabled={busy} onClick={append}>
                  {content}
                </button>
              ) : (
                <span class="candidate">{content}</span>
              )}
            </li>
          );
        })}
      </ol>
      <p class="note">{t("entropyIs", { nats: t("inNats", { number: number(output.entropy) }) })}</p>
      {generates ? <NewestToken trace={trace} /> : null}
    </>
  );
}

/** The attention of the newest generated token in every head. */
function NewestToken({ trace }: { trace: Trace }): JSX.Element | null {
  const { newest } = useStore();
  const { t } = useViewLocale();
  if (!newest || newest.trace !== trace.id) return null;
  const rows = new Map(newest.rows.map((row) => [row.layer, row]));
  const token = newest.token.text;
  return (
    <section class="newest">
      <h3>
        <bdi>{t("newestToken", { token: plainToken(token) })}</bdi>
      </h3>
      <Grids trace={trace} word={{ rows, side: "attends", token }} onlyInvolved />
    </section>
  );
}

function TextDifference({ one, other }: { one: Trace; other: Trace }): JSX.Element {
  const { t } = useViewLocale();
  const difference = useRequest<Difference>("compare", { one: one.id, other: other.id });
  return (
    <section class="between">
      <h3>{t("betweenTexts")}</h3>
      {difference ? <DifferenceTable difference={difference} columns={["A", "B"]} /> : null}
    </section>
  );
}
