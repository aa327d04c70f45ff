/** What was found, in plain words, each a link to its evidence; and how this was made. */
import type { JSX } from "preact";
import type { Finding } from "../data";
import { useWords } from "../parts/language";
import { hrefOf } from "../parts/router";
import { Line } from "../parts/tokens";
import { overName } from "./head-roles";
import { headHref, marksOf, useModel } from "./model";

/** Where the evidence of a finding is. */
export function evidenceOf(finding: Finding): string {
  const mark = marksOf(finding.heads);
  const [first] = finding.heads;
  switch (finding.view) {
    case "head":
      return first ? headHref(first) : hrefOf(["overview"]);
    case "alike":
    case "matters":
      return hrefOf([finding.view], { mark });
    case "roles":
      return hrefOf(["overview"], { mark });
    case "overview":
      return hrefOf(["overview"], { color: finding.column, mark });
  }
}

function sentence(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function FindingList({ findings }: { findings: Finding[] }): JSX.Element {
  const { text, say } = useWords();
  return (
    <ol class="findings">
      {findings.map((finding) => (
        <li key={finding.text.en}>
          <a href={evidenceOf(finding)}>
            <Line text={sentence(text(finding.text))} />
            <span class="go" aria-hidden="true">
              {"\u00a0→"}
            </span>
            <span class="offstage">{say("seeEvidence")}</span>
          </a>
        </li>
      ))}
    </ol>
  );
}

export function FindingsView(): JSX.Element {
  const { page } = useModel();
  const { say, count, number, text } = useWords();
  const { facts } = page;
  const rows: [string, string][] = [
    [say("aboutModel"), say("modelOf", { model: facts.model, kind: text(facts.kind) })],
    ...(facts.edits ? [[say("aboutEdits"), text(facts.edits)] as [string, string]] : []),
    [say("aboutText"), say("factTokens", { tokens: count(facts.tokens), documents: count(facts.documents) })],
    [say("aboutContexts"), say("contextsOf", { contexts: count(facts.contexts), context: count(facts.context) })],
    [say("aboutIntervals"), say(overName(facts.intervals_over))],
    [say("aboutUnknown"), number(facts.unknown, "share")],
    [say("aboutLoss"), facts.loss ? text(facts.loss) : "–"],
    [say("aboutPairs"), facts.pairs_by ? text(facts.pairs_by) : "–"],
    [say("aboutTime"), say("seconds", { seconds: number(facts.seconds) })],
    [
      say("aboutVersions"),
      Object.entries(facts.versions)
        .map(([name, version]) => `${name} ${version}`)
        .join(", "),
    ],
  ];
  return (
    <>
      <h2 tabIndex={-1}>{say("findings")}</h2>
      {page.findings.length ? <FindingList findings={page.findings} /> : <p class="muted">{say("noFindings")}</p>}
      <section class="panel" aria-labelledby="about-run">
        <h3 id="about-run">{say("aboutRun")}</h3>
        <dl class="about">
          {rows.map(([name, value]) => (
            <div>
              <dt>{name}</dt>
              <dd>
                <Line text={value} />
              </dd>
            </div>
          ))}
        </dl>
        {facts.left_out.length ? (
          <>
            <h4>{say("leftOut")}</h4>
            <ul>
              {facts.left_out.map((reason) => (
                <li>
                  <Line text={text(reason)} />
                </li>
              ))}
            </ul>
          </>
        ) : null}
      </section>
    </>
  );
}
