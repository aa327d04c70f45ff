/** What people ask first, answered before anything else: who looks back, which two are alike, which matter. */
import type { ComponentChildren, JSX } from "preact";
import type { Head, Place } from "../data";
import { useWords } from "../parts/language";
import { hrefOf } from "../parts/router";
import { Line } from "../parts/tokens";
import { marksOf, useModel, withUnit, type Model } from "./model";
import { PlaceLink } from "./place-link";
import { mostAlike } from "./relations";

const PREVIOUS = "previous";
const MOST = 6; // heads that are named of a role
const NEEDED = 3; // that are named of those that matter

const placeOf = (head: Head): Place => [head.site, head.head];

export function Glance(): JSX.Element {
  const { say } = useWords();
  const model = useModel();
  return (
    <section class="glance" aria-labelledby="glance">
      <h2 id="glance" tabIndex={-1}>
        {say("atAGlance")}
      </h2>
      <p class="note">{say("glanceNames")}</p>
      <dl>
        {model.role(PREVIOUS) ? <LooksBack model={model} /> : null}
        <Alike model={model} />
        {model.page.importance ? <Matters model={model} /> : null}
      </dl>
    </section>
  );
}

interface AnswerProps {
  question: string;
  heads: Place[];
  /** Where all of it is told. */
  more: string;
  children: ComponentChildren;
}

function Answer({ question, heads, more, children }: AnswerProps): JSX.Element {
  const { say } = useWords();
  const { stacks } = useModel().page;
  return (
    <div>
      <dt>{question}</dt>
      <dd>
        {heads.length ? (
          <span class={stacks.length > 1 ? "answer long" : "answer"}>
            {heads.map((place) => (
              <PlaceLink key={place.join(".")} place={place} />
            ))}
          </span>
        ) : null}
        <span class="muted">{children}</span>{" "}
        <a href={more} aria-label={`${question} ${say("glanceAll")}`}>
          {say("glanceAll")}
        </a>
      </dd>
    </div>
  );
}

function LooksBack({ model }: { model: Model }): JSX.Element {
  const { say, text } = useWords();
  const heads = model.holding(PREVIOUS);
  const best = heads[0]?.roles.find((score) => score.role === PREVIOUS);
  return (
    <Answer
      question={say("glancePrevious")}
      heads={heads.slice(0, MOST).map(placeOf)}
      more={hrefOf(["overview"], { role: PREVIOUS })}
    >
      {best ? <Line text={say("glanceFirst", { evidence: text(best.evidence) })} /> : say("glanceNoPrevious")}
    </Answer>
  );
}

function Alike({ model }: { model: Model }): JSX.Element {
  const { say, number } = useWords();
  const pair = mostAlike(model);
  const heads = pair ? [pair.one, pair.other] : [];
  const threshold = model.page.likeness?.threshold;
  const value = number(pair?.value);
  const said = !pair
    ? say("glanceNoPairs")
    : threshold === undefined
      ? say("glanceCosine", { value })
      : pair.value >= threshold
        ? say("glanceSame", { value })
        : say("glanceNotSame", { value, threshold: number(threshold) });
  return (
    <Answer question={say("glanceAlike")} heads={heads} more={hrefOf(["alike"], { mark: marksOf(heads) })}>
      {said}
    </Answer>
  );
}

function Matters({ model }: { model: Model }): JSX.Element {
  const words = useWords();
  const { say, text } = words;
  const heads = model.ranked().slice(0, NEEDED);
  const column = model.column(model.page.importance?.column ?? "");
  const value = column ? withUnit(heads[0]?.values[column.name], column.format, words) : "";
  return (
    <Answer question={say("glanceMatters")} heads={heads.map(placeOf)} more={hrefOf(["matters"])}>
      {column && heads.length ? say("glanceMost", { column: text(column.label), value }) : say("noImportance")}
    </Answer>
  );
}
