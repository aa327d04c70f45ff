/** Commands that prune heads. */
import type { JSX } from "preact";
import type { HeadId } from "../data";
import { CopyButton } from "../parts/copy-button";
import { useLocale } from "../parts/language";
import { useModel, type Model } from "./model";

const TEXT = "text.txt"; // placeholder for calibration data
const SHARE = "20%";
const FORM = ["--form", "uneven"]; // possible for all models and heads

/** Prune one head; the remaining heads of its layer compensate. */
export function EditOfHead({ head }: { head: HeadId }): JSX.Element | null {
  const model = useModel();
  const { t } = useLocale();
  const name = model.page.facts.name;
  if (!name) return null;
  return (
    <Command
      about={t("editPrune")}
      options={["prune", name, "--heads", model.name(head), ...stackOf(model, head), "--text", TEXT, ...FORM]}
      output="pruned"
    />
  );
}

/** Prune a share of all heads. */
export function EditsOfModel(): JSX.Element | null {
  const { page } = useModel();
  const { t } = useLocale();
  // A share refers to one stack; with several, the command would have to name it.
  if (!page.facts.name || page.stacks.length !== 1) return null;
  return (
    <Command
      about={t("editShare", { share: SHARE })}
      options={["prune", page.facts.name, "--share", SHARE, "--text", TEXT, ...FORM]}
      output="pruned"
    />
  );
}

function Command({ about, options, output }: { about: string; options: string[]; output: string }): JSX.Element {
  const { t } = useLocale();
  const command = ["polyhead", ...options.map(quoted), "--output", output].join(" ");
  return (
    <div class="command">
      <span class="note">{about}</span>
      <code>{command}</code>
      <CopyButton text={command} label={t("copy")} about={t("copyCommand")} />
    </div>
  );
}

/** Quotes a word for a shell. */
function quoted(word: string): string {
  return /^[\w.,:/%+@=-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** The option that selects a stack, if there are several. */
function stackOf(model: Model, [site]: HeadId): string[] {
  return model.page.stacks.length < 2 ? [] : ["--stack", model.page.sites[site]?.stack ?? "?"];
}
