/** The difference of two outputs: a number, and the tokens that change most. */
import type { JSX } from "preact";
import { Token } from "../parts/tokens";
import { useViewLocale } from "./language";
import type { Difference } from "./types";

const SHOWN = 8;

/** `columns` are the headings of the two outputs. */
export function DifferenceTable({ difference, columns }: { difference: Difference; columns: string[] }): JSX.Element {
  const { t, number } = useViewLocale();
  const { top, cosine, divergence } = difference;
  if (!top) {
    // Five digits, as similar embeddings differ only after several nines.
    return (
      <p class="measure" data-cosine={cosine}>
        {t("cosineIs", { cosine: cosine === null ? "–" : cosine.toFixed(5) })}
      </p>
    );
  }
  const nats = divergence === null ? t("notFinite") : t("inNats", { number: number(divergence) });
  return (
    <>
      <p class="measure" data-divergence={divergence}>
        {t("divergenceIs", { nats })}
      </p>
      <table class="changes">
        <thead>
          <tr>
            <th scope="col">{t("token")}</th>
            {columns.map((column) => (
              <th scope="col" class="numeric">
                {column}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {top.slice(0, SHOWN).map(({ id, text, before, after }) => (
            <tr key={id} data-token={id}>
              <th scope="row">
                <Token text={text} />
              </th>
              <td class="numeric">{number(before, "share")}</td>
              <td class={`numeric ${(after ?? 0) > (before ?? 0) ? "more" : "less"}`}>{number(after, "share")}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
