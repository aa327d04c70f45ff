/** Commands that prune or merge redundant heads. */
import type { JSX } from "preact";
import type { Group, HeadId } from "../data";
import { CopyButton } from "../parts/copy-button";
import { useLocale } from "../parts/language";
import { idOf, keyOf, useModel, type Model } from "./model";

const TEXT = "text.txt"; // placeholder for calibration data
const SHARE = "20%";
const FORM = ["--form", "uneven"]; // possible for all models and heads

/** Keep the most important head of a group and prune the rest, or merge the group into one head. */
export function EditsOfGroup({ group }: { group: Group }): JSX.Element | null {
  const model = useModel();
  const { t } = useLocale();
  const name = model.page.facts.name;
  if (!name) return null;
  const [best, ...others] = byImportance(model, group.heads);
  if (!best || !others.length) return null;
  const stack = stackOf(model, best);
  const listed = (heads: HeadId[], separator: string) =>
    [...heads]
      .sort((one, other) => one[1] - other[1])
      .map((id) => model.name(id))
      .join(separator);
  return (
    <>
      <Command
        about={t("editPrune", { head: model.name(best) })}
        options={["prune", name, "--heads", listed(others, ","), ...stack, "--text", TEXT, ...FORM]}
        output="pruned"
      />
      <Command
        about={t("editMerge")}
        options={["merge", name, "--heads", listed(group.heads, "+"), ...stack, ...FORM]}
        output="merged"
      />
    </>
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

/** The most important head first; in the given order if importance was not measured. */
function byImportance(model: Model, heads: HeadId[]): HeadId[] {
  const ranked = new Map(model.ranked().map((head, i) => [keyOf(idOf(head)), i]));
  const rank = (id: HeadId) => ranked.get(keyOf(id)) ?? ranked.size;
  return [...heads].sort((one, other) => rank(one) - rank(other));
}
