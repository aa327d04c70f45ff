/** A button that copies a text; without access to the clipboard, the text is shown for copying by hand. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useLocale } from "./language";

/** A frame may deny the clipboard; other browsers only fail when it is used. */
function mayCopy(): boolean {
  const policy = (document as { featurePolicy?: { allowsFeature: (name: string) => boolean } }).featurePolicy;
  return policy ? policy.allowsFeature("clipboard-write") : true;
}

interface CopyButtonProps {
  text: string;
  /** Caption of the button. */
  label: string;
  /** Description of the text for screen readers. */
  about: string;
}

export function CopyButton({ text, label, about }: CopyButtonProps): JSX.Element {
  const { t } = useLocale();
  const [state, setState] = useState<"ready" | "copied" | "shown">("ready");
  useEffect(() => setState("ready"), [text]);
  const copy = async () => {
    try {
      if (!mayCopy()) throw new Error("the surrounding frame denies access to the clipboard");
      await navigator.clipboard.writeText(text);
      setState("copied");
    } catch {
      setState("shown");
    }
  };
  return (
    <span class="copy">
      <button type="button" onClick={copy} aria-label={state === "ready" && about.includes(label) ? about : undefined}>
        {state === "copied" ? t("copied") : label}
      </button>
      <span class="offstage" role="status">
        {state === "copied" ? t("copied") : ""}
      </span>
      {state === "shown" ? (
        <input aria-label={about} readOnly value={text} onFocus={(event) => event.currentTarget.select()} />
      ) : null}
    </span>
  );
}
