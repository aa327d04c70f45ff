/** How two outputs of a model differ: a number, and the tokens that change most. */
import type { JSX } from "preact";
import { Token } from "../parts/tokens";
import { useView } from "./language";
import type { Difference } from "./types";

const SHOWN = 8;

/** The columns are "before" and "after" unless they are named. */
export function DifferenceTable({ found, columns }: { found: Difference; columns?: [string, string] }): JSX.Element {
  const { say, number } = useView();
  const [before, after] = columns ?? [say("before"), say("after")];
  // A vector has no tokens; a divergence that is missing was infinite.
  if (!found.top)
    return (
      <p class="measure" data-cosine={found.cosine}>
        {say("cosineIs", { cosine: digits(found.cosine) })}
      </p>
    );
  const nats = found.divergence === null ? say("endless") : say("inNats", { number: number(found.divergence) });
  return (
    <>
      <p class="measure" data-divergence={found.divergence}>
        {say("divergenceIs", { nats })}
      </p>
      <table class="changes">
        <thead>
          <tr>
            <th scope="col">{say("token")}</th>
            <th scope="col" class="numeric">
              {before}
            </th>
            <th scope="col" class="numeric">
              {after}
            </th>
          </tr>
        </thead>
        <tbody>
          {found.top.slice(0, SHOWN).map((change) => (
            <tr key={change.id} data-token={change.id}>
              <th scope="row">
                <Token text={change.text} />
              </th>
              <td class="numeric">{number(change.before, "share")}</td>
              <td class={`numeric ${(change.after ?? 0) > (change.before ?? 0) ? "more" : "less"}`}>
                {number(change.after, "share")}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

/** Near 1 the digits after the nines are what counts. */
function digits(cosine: number | null): string {
  return cosine === null ? "–" : cosine.toFixed(5);
}
