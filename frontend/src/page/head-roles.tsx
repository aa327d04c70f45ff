/** How far one head has each role: the score, its interval, and what chance would show. */
import { axisX, axisY, dot, link, ruleX, ruleY, tickX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Head, RoleScore } from "../data";
import { ChartFigure, widthOf, type Build } from "../parts/chart";
import { useWords, type StringName } from "../parts/language";
import { Line } from "../parts/tokens";
import { isNumber, useModel } from "./model";

const ROW = 24;

export function HeadRoles({ head }: { head: Head }): JSX.Element | null {
  const model = useModel();
  const words = useWords();
  const { say, text, number } = words;
  const scores = useMemo(() => head.roles.filter((score) => isNumber(score.score)), [head]);
  const labelOf = (score: RoleScore) => {
    const role = model.role(score.role);
    return role ? text(role.label) : score.role;
  };
  const build = useMemo<Build>(
    () => (width) => {
      const ends = scores.flatMap((score) => [score.score, score.low, score.high, score.null]).filter(isNumber);
      const labels = scores.map(labelOf);
      const longest = Math.max(0, ...labels.map((label) => widthOf(label)));
      const row = (score: RoleScore) => labelOf(score);
      return {
        width,
        height: ROW * scores.length + 60,
        marginLeft: Math.min(longest + 16, width * 0.46),
        marginTop: 28,
        marginRight: 20,
        x: { domain: [Math.min(0, ...ends), Math.max(1, ...ends)], nice: true },
        y: { type: "band", domain: labels },
        marks: [
          ruleY(scores, { y: row, stroke: "var(--line)" }),
          ruleX([0], { stroke: "var(--muted)" }),
          link(
            scores.filter((score) => isNumber(score.low) && isNumber(score.high)),
            { x1: "low", x2: "high", y1: row, y2: row, stroke: "var(--first)", strokeWidth: 3, strokeOpacity: 0.55 },
          ),
          tickX(
            scores.filter((score) => isNumber(score.null)),
            { x: "null", y: row, stroke: "var(--second)", strokeWidth: 2, inset: 5 },
          ),
          dot(scores, {
            x: "score",
            y: row,
            r: 5,
            fill: (score: RoleScore) => (score.holds ? "var(--first)" : "var(--paper)"),
            stroke: "var(--first)",
            strokeWidth: 1.5,
          }),
          axisX({ anchor: "top", label: null, ticks: Math.max(3, Math.floor(width / 110)) }),
          axisY({
            label: null,
            tickSize: 0,
            fontSize: 12,
            lineWidth: (width * 0.46 - 12) / 12,
            textOverflow: "ellipsis",
          }),
        ],
      };
    },
    [scores, words],
  );
  if (!scores.length) return null;
  return (
    <ChartFigure
      class="tall"
      title={say("roleScores")}
      note={
        <>
          {say("roleScoresAbout", { over: say(overName(model.page.facts.intervals_over)) })}{" "}
          <span class="key">
            <span class="key-dot full" /> {say("keyHolds")} <span class="key-dot" /> {say("keyHoldsNot")}{" "}
            <span class="key-bar" /> {say("keyInterval")} <span class="key-tick" /> {say("keyChance")}
          </span>
        </>
      }
      name={`head-${head.site}-${head.head}-roles`}
      fileTitle={`${model.long([head.site, head.head], words)}: ${say("roleScores")}`}
      label={say("roleScoresDescribed", {
        roles: model.held(head).map(labelOf).join(", ") || say("noRole"),
      })}
      build={build}
    >
      <details>
        <summary>{say("asTable")}</summary>
        <div class="table-scroll" tabIndex={0} role="region" aria-label={say("roleScores")}>
          <table>
            <thead>
              <tr>
                <th scope="col">{say("role")}</th>
                <th scope="col">{say("score")}</th>
                <th scope="col">{say("interval")}</th>
                <th scope="col">{say("chance")}</th>
                <th scope="col">{say("evidence")}</th>
              </tr>
            </thead>
            <tbody>
              {head.roles.map((score) => (
                <tr key={score.role} class={score.holds ? "marked" : ""}>
                  <th scope="row">{labelOf(score)}</th>
                  <td class="numeric">{number(score.score)}</td>
                  <td class="numeric">
                    {isNumber(score.low) && isNumber(score.high) ? `${number(score.low)} – ${number(score.high)}` : "–"}
                  </td>
                  <td class="numeric">{number(score.null)}</td>
                  <td>
                    <Line text={text(score.evidence)} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </ChartFigure>
  );
}

/** What intervals are drawn from. */
export function overName(over: string): StringName {
  return over === "contexts" ? "over_contexts" : "over_documents";
}
