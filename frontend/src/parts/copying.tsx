/** A button that copies a text; where the clipboard is closed, the text is shown to be copied by hand. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useWords } from "./language";

/** A frame may close the clipboard; browsers that cannot tell are asked by trying. */
function mayCopy(): boolean {
  const policy = (document as { featurePolicy?: { allowsFeature: (name: string) => boolean } }).featurePolicy;
  return policy ? policy.allowsFeature("clipboard-write") : true;
}

interface CopyButtonProps {
  text: string;
  /** What stands on the button. */
  label: string;
  /** What the text is, for who cannot see where it stands. */
  about: string;
}

export function CopyButton({ text, label, about }: CopyButtonProps): JSX.Element {
  const { say } = useWords();
  const [state, setState] = useState<"ready" | "copied" | "shown">("ready");
  useEffect(() => setState("ready"), [text]);
  const copy = async () => {
    try {
      if (!mayCopy()) throw new Error("the frame around the page has closed the clipboard");
      await navigator.clipboard.writeText(text);
      setState("copied");
    } catch {
      setState("shown");
    }
  };
  return (
    <span class="copy">
      <button type="button" onClick={copy} aria-label={state === "ready" && about.includes(label) ? about : undefined}>
        {state === "copied" ? say("copied") : label}
      </button>
      <span class="offstage" role="status">
        {state === "copied" ? say("copied") : ""}
      </span>
      {state === "shown" ? (
        <input aria-label={about} readOnly value={text} onFocus={(event) => event.currentTarget.select()} />
      ) : null}
    </span>
  );
}
