/** The ablated heads, and their effect on the output. */
import type { JSX } from "preact";
import { DifferenceTable } from "./difference";
import { useViewLocale } from "./language";
import { headName } from "./names";
import { useStore } from "./store";
import { headKey, type Trace } from "./types";

export function AblatedHeads(): JSX.Element {
  const store = useStore();
  const locale = useViewLocale();
  const { t } = locale;
  const heads = store.ablatedHeads();
  const outdated = store.loaded.some((trace) => store.newlyAblated(trace).length > 0);
  return (
    <section class="ablated-heads">
      <h3>{t("ablatedHeads")}</h3>
      {heads.length ? (
        <>
          <ul class="plain ablated-list">
            {heads.map((head) => {
              const name = headName(store.state, head, locale);
              const label = t("restoreNamed", { head: name });
              return (
                <li key={headKey(head)}>
                  <button type="button" aria-label={label} onClick={() => store.toggle(head)}>
                    {name} <span aria-hidden="true">×</span>
                  </button>
                </li>
              );
            })}
          </ul>
          <div class="buttons">
            <button type="button" onClick={() => void store.restoreAll()}>
              {t("restoreAll")}
            </button>
            <button type="button" disabled={!outdated || store.busy.size > 0} onClick={() => void store.rerun()}>
              {t("runWithout")}
            </button>
          </div>
          {outdated ? <p class="note">{t("runWithoutAbout")}</p> : null}
        </>
      ) : (
        <p class="note">{t("noneAblated")}</p>
      )}
      {store.loaded.map((trace) => (
        <Effect key={trace.slot} trace={trace} />
      ))}
    </section>
  );
}

function Effect({ trace }: { trace: Trace }): JSX.Element {
  const store = useStore();
  const locale = useViewLocale();
  const { t } = locale;
  const { slot } = trace;
  const effect = store.effects[slot];
  const heads = locale.list(trace.ablated.map((head) => headName(store.state, head, locale)));
  return (
    <div class="effect" data-slot={slot} role="status">
      {trace.ablated.length ? <p class="note">{t("ranWithout", { slot, heads })}</p> : null}
      {store.newlyAblated(trace).length ? (
        <>
          <h4>{t("effectOf", { slot })}</h4>
          {effect ? (
            <DifferenceTable difference={effect} columns={[t("before"), t("after")]} />
          ) : (
            <p class="note">{t("effectComputing")}</p>
          )}
        </>
      ) : null}
    </div>
  );
}
