/** What could be done about heads that are alike: edits as commands to copy. */
import type { JSX } from "preact";
import type { Group, Place } from "../data";
import { CopyButton } from "../parts/copying";
import { useWords } from "../parts/language";
import { keyOf, useModel, type Model } from "./model";

/** A text to calibrate on is the reader's; this stands for it. */
const TEXT = "text.txt";
const SHARE = "20%";

/** A group as one head, and as the one of its heads that matters most while the others make up for the rest. */
export function EditsOfGroup({ group }: { group: Group }): JSX.Element | null {
  const model = useModel();
  const { say } = useWords();
  const name = model.page.facts.name;
  if (!name) return null;
  const [kept, ...others] = byImportance(model, group.heads);
  if (!kept || !others.length) return null;
  const stack = stackOf(model, kept);
  const heads = [...group.heads].sort((one, other) => one[1] - other[1]);
  const removed = others.sort((one, other) => one[1] - other[1]);
  return (
    <>
      <Command
        about={say("editPrune", { head: numbered(model, kept) })}
        words={["prune", name, "--heads", removed.map((x) => numbered(model, x)).join(","), ...stack, "--text", TEXT]}
        output="pruned"
      />
      <Command
        about={say("editMerge")}
        words={["merge", name, "--heads", heads.map((x) => numbered(model, x)).join("+"), ...stack]}
        output="merged"
      />
    </>
  );
}

/** Heads that the others can make up for, whoever they are alike. */
export function EditsOfModel(): JSX.Element | null {
  const { page } = useModel();
  const { say } = useWords();
  // Shares are taken of one stack of layers, which a model with several would have to name.
  if (!page.facts.name || page.stacks.length !== 1) return null;
  return (
    <Command
      about={say("editShare", { share: SHARE })}
      words={["prune", page.facts.name, "--share", SHARE, "--text", TEXT]}
      output="pruned"
    />
  );
}

function Command({ about, words, output }: { about: string; words: string[]; output: string }): JSX.Element {
  const { say } = useWords();
  const command = ["polyhead", ...words.map(quoted), "--output", output].join(" ");
  return (
    <div class="command">
      <span class="note">{about}</span>
      <code>{command}</code>
      <CopyButton text={command} label={say("copy")} about={say("copyCommand")} />
    </div>
  );
}

/** As a shell reads one word. */
function quoted(word: string): string {
  return /^[\w.,:/%+@=-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** `2.7`, as commands number heads. */
function numbered(model: Model, [site, head]: Place): string {
  return `${model.page.sites[site]?.layer ?? "?"}.${head}`;
}

/** Which layers a command means, where a model has several stacks of them. */
function stackOf(model: Model, [site]: Place): string[] {
  return model.page.stacks.length < 2 ? [] : ["--stack", model.page.sites[site]?.stack ?? "?"];
}

/** The one the model would miss most first; as they stand where that was not measured. */
function byImportance(model: Model, heads: Place[]): Place[] {
  const ranked = new Map(model.ranked().map((head, i) => [keyOf([head.site, head.head]), i]));
  const rank = (place: Place) => ranked.get(keyOf(place)) ?? ranked.size;
  return [...heads].sort((one, other) => rank(one) - rank(other));
}
