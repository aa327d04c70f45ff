/** Role scores of one head, with intervals and chance levels. */
import { axisX, axisY, dot, link, ruleX, ruleY, tickX } from "@observablehq/plot";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Head, RoleScore } from "../data";
import { ChartFigure, widthOf, type Build } from "../parts/chart";
import { CodeName } from "../parts/code-name";
import { TableRegion } from "../parts/controls";
import { useLocale, type StringName } from "../parts/language";
import { Line } from "../parts/tokens";
import { idOf, isNumber, useModel } from "./model";

const ROW = 24;
const LABELS = 0.55; // of the width, at most
export const INTERVAL = { stroke: "var(--first)", strokeWidth: 3, strokeOpacity: 0.55 };
const AXIS = { label: null, tickSize: 0, fontSize: 12, textOverflow: "ellipsis" } as const;

export function HeadRoles({ head }: { head: Head }): JSX.Element | null {
  const model = useModel();
  const locale = useLocale();
  const { t, text, number } = locale;
  const scores = useMemo(() => head.roles.filter((score) => isNumber(score.score)), [head]);
  const labelOf = (score: RoleScore) => {
    const role = model.role(score.role);
    return role ? text(role.label) : score.role;
  };
  const build = useMemo<Build>(
    () => (width) => {
      const ends = scores.flatMap((score) => [score.score, score.low, score.high, score.null]).filter(isNumber);
      const labels = scores.map(labelOf);
      const intervals = scores.filter((score) => isNumber(score.low) && isNumber(score.high));
      const chances = scores.filter((score) => isNumber(score.null));
      const fillOf = (score: RoleScore) => (score.holds ? "var(--first)" : "var(--paper)");
      const longest = Math.max(0, ...labels.map((label) => widthOf(label)));
      return {
        width,
        height: ROW * scores.length + 60,
        marginLeft: Math.min(longest + 16, width * LABELS),
        marginTop: 28,
        marginRight: 20,
        x: { domain: [Math.min(0, ...ends), Math.max(1, ...ends)], nice: true },
        y: { type: "band", domain: labels },
        marks: [
          ruleY(scores, { y: labelOf, stroke: "var(--line)" }),
          ruleX([0], { stroke: "var(--muted)" }),
          link(intervals, { x1: "low", x2: "high", y1: labelOf, y2: labelOf, ...INTERVAL }),
          tickX(chances, { x: "null", y: labelOf, stroke: "var(--second)", strokeWidth: 2, inset: 5 }),
          dot(scores, { x: "score", y: labelOf, r: 5, fill: fillOf, stroke: "var(--first)", strokeWidth: 1.5 }),
          axisX({ anchor: "top", label: null, ticks: Math.max(3, Math.floor(width / 110)) }),
          axisY({ ...AXIS, lineWidth: (width * LABELS - 12) / 12 }),
        ],
      };
    },
    [scores, locale],
  );
  if (!scores.length) return null;
  return (
    <ChartFigure
      class="tall"
      title={t("roleScores")}
      note={
        <>
          {t("roleScoresAbout", { over: t(overName(model.page.facts.intervals_over)) })}{" "}
          <span class="key">
            <Key mark="dot full" name={t("keyHolds")} /> <Key mark="dot" name={t("keyHoldsNot")} />{" "}
            <Key mark="bar" name={t("keyInterval")} /> <Key mark="tick" name={t("keyChance")} />
          </span>
        </>
      }
      name={`head-${head.site}-${head.head}-roles`}
      fileTitle={`${model.fullName(idOf(head), locale)}: ${t("roleScores")}`}
      label={t("roleScoresDescribed", { roles: model.rolesOf(head).map(labelOf).join(", ") || t("noRole") })}
      build={build}
    >
      <details>
        <summary>{t("asTable")}</summary>
        <TableRegion label={t("roleScores")}>
          <table>
            <thead>
              <tr>
                {(["role", "score", "interval", "chance", "evidence"] as const).map((name) => (
                  <th scope="col">{t(name)}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {head.roles.map((score) => (
                <tr key={score.role} class={score.holds ? "marked" : ""}>
                  <th scope="row">
                    <CodeName label={labelOf(score)} name={score.role} />
                  </th>
                  <td class="numeric">{isNumber(score.score) ? number(score.score) : t("notComputed")}</td>
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
        </TableRegion>
      </details>
    </ChartFigure>
  );
}

/** A mark of a chart and its meaning, on one line. */
export function Key({ mark, name }: { mark: string; name: string }): JSX.Element {
  return (
    <span class="key-entry">
      <span class={`key-${mark}`} /> {name}
    </span>
  );
}

/** The unit that intervals are computed over. */
export function overName(over: string): StringName {
  return over === "contexts" ? "over_contexts" : "over_documents";
}
