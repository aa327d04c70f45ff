/** Findings, each with a link to its evidence, and the settings of the run. */
import type { JSX } from "preact";
import type { Finding } from "../data";
import { useLocale } from "../parts/language";
import { hrefOf } from "../parts/router";
import { Line } from "../parts/tokens";
import { overName } from "./head-roles";
import { headHref, marksOf, useModel } from "./model";

/** The view with the evidence of a finding. */
function evidenceOf(finding: Finding): string {
  const mark = marksOf(finding.heads);
  const [first] = finding.heads;
  switch (finding.view) {
    case "head":
      return first ? headHref(first) : hrefOf(["overview"]);
    case "similar":
    case "importance":
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
  const { text, t } = useLocale();
  return (
    <ol class="findings">
      {findings.map((finding) => (
        <li key={finding.text.en}>
          <a href={evidenceOf(finding)}>
            <Line text={sentence(text(finding.text))} />
            <span class="go" aria-hidden="true">
              {"\u00a0→"}
            </span>
            <span class="offstage">{t("seeEvidence")}</span>
          </a>
        </li>
      ))}
    </ol>
  );
}

export function FindingsView(): JSX.Element {
  const { page } = useModel();
  const { t, count, number, text } = useLocale();
  const { facts } = page;
  const versions = Object.entries(facts.versions).map(([name, version]) => `${name} ${version}`);
  const rows: [string, string][] = [
    [t("aboutModel"), t("modelOf", { model: facts.model, kind: text(facts.kind) })],
    ...(facts.edits ? [[t("aboutEdits"), text(facts.edits)] as [string, string]] : []),
    [t("aboutText"), t("factTokens", { tokens: count(facts.tokens), documents: count(facts.documents) })],
    [t("aboutContexts"), t("contextsOf", { contexts: count(facts.contexts), context: count(facts.context) })],
    [t("aboutIntervals"), t(overName(facts.intervals_over))],
    [t("aboutUnknown"), number(facts.unknown, "share")],
    [t("aboutLoss"), facts.loss ? text(facts.loss) : "–"],
    [t("aboutPairs"), facts.pairs_by ? text(facts.pairs_by) : "–"],
    [t("aboutTime"), t("seconds", { seconds: number(facts.seconds) })],
    [t("aboutVersions"), versions.join(", ")],
  ];
  return (
    <>
      <h2 tabIndex={-1}>{t("findings")}</h2>
      {page.findings.length ? <FindingList findings={page.findings} /> : <p class="muted">{t("noFindings")}</p>}
      <section class="panel" aria-labelledby="about-run">
        <h3 id="about-run">{t("aboutRun")}</h3>
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
            <h4>{t("leftOut")}</h4>
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
