/** Answers to three common questions: previous-token heads, redundant heads, the most important heads. */
import type { ComponentChildren, JSX } from "preact";
import type { HeadId } from "../data";
import { useLocale } from "../parts/language";
import { hrefOf } from "../parts/router";
import { Line } from "../parts/tokens";
import { HeadLink } from "./head-link";
import { idOf, keyOf, marksOf, useModel, withUnit } from "./model";

const PREVIOUS = "previous";
const MAX_PREVIOUS = 6; // heads listed
const MAX_REDUNDANT = 4;
const MAX_IMPORTANT = 3;

export function Summary(): JSX.Element {
  const { t } = useLocale();
  const model = useModel();
  return (
    <section class="answers" aria-labelledby="summary">
      <h2 id="summary" tabIndex={-1}>
        {t("summary")}
      </h2>
      <p class="note">{t("summaryNames")}</p>
      <dl>
        {model.role(PREVIOUS) ? <PreviousToken /> : null}
        <Redundant />
        {model.page.importance ? <Important /> : null}
      </dl>
    </section>
  );
}

interface AnswerProps {
  question: string;
  heads: HeadId[];
  /** Link to the full answer. */
  more: string;
  children: ComponentChildren;
}

function Answer({ question, heads, more, children }: AnswerProps): JSX.Element {
  const { t } = useLocale();
  const { stacks } = useModel().page;
  return (
    <div>
      <dt>{question}</dt>
      <dd>
        {heads.length ? (
          <span class={stacks.length > 1 ? "answer long" : "answer"}>
            {heads.map((id) => (
              <HeadLink key={keyOf(id)} id={id} />
            ))}
          </span>
        ) : null}
        <span class="muted">{children}</span>{" "}
        <a href={more} aria-label={`${question} ${t("summaryMore")}`}>
          {t("summaryMore")}
        </a>
      </dd>
    </div>
  );
}

function PreviousToken(): JSX.Element {
  const { t, text } = useLocale();
  const heads = useModel().headsWithRole(PREVIOUS);
  const best = heads[0]?.roles.find((score) => score.role === PREVIOUS);
  return (
    <Answer
      question={t("summaryPrevious")}
      heads={heads.slice(0, MAX_PREVIOUS).map(idOf)}
      more={hrefOf(["overview"], { role: PREVIOUS })}
    >
      {best ? <Line text={t("summaryFirst", { evidence: text(best.evidence) })} /> : t("summaryNoPrevious")}
    </Answer>
  );
}

function Redundant(): JSX.Element {
  const { redundancy, redundant } = useModel().page;
  const { t, number } = useLocale();
  const heads = redundant.slice(0, MAX_REDUNDANT).map((one) => one.head);
  let answer = t("noRedundancy");
  if (redundant[0]) answer = t("summaryRedundant", { share: number(redundant[0].share, "share") });
  else if (redundancy !== null) answer = t("summaryNotRedundant", { threshold: number(redundancy, "share") });
  return (
    <Answer question={t("summaryWhichRedundant")} heads={heads} more={hrefOf(["similar"], { mark: marksOf(heads) })}>
      {answer}
    </Answer>
  );
}

function Important(): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t, text } = locale;
  const heads = model.ranked().slice(0, MAX_IMPORTANT);
  const column = model.column(model.page.importance?.column ?? "");
  const value = column ? withUnit(model.value(heads[0], column.name), column.format, locale) : "";
  return (
    <Answer question={t("summaryImportant")} heads={heads.map(idOf)} more={hrefOf(["importance"])}>
      {column && heads.length ? t("summaryMost", { column: text(column.label), value }) : t("noImportance")}
    </Answer>
  );
}
