/** The address of the view, to be sent to somebody. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useWords } from "../parts/language";
import { changed, type Route } from "../parts/router";
import { useModel } from "./model";

/** A frame may close the clipboard; browsers that cannot tell are asked by trying. */
function mayCopy(): boolean {
  const policy = (document as { featurePolicy?: { allowsFeature: (name: string) => boolean } }).featurePolicy;
  return policy ? policy.allowsFeature("clipboard-write") : true;
}

/** Copies the address of this view; where the clipboard is closed, shows it to be copied by hand. */
export function CopyLink({ route }: { route: Route }): JSX.Element {
  const { page } = useModel();
  const { say, language } = useWords();
  const [state, setState] = useState<"ready" | "copied" | "shown">("ready");
  const here = changed(
    { ...route, path: route.path.length ? route.path : ["overview"] },
    {
      lang: language === page.lang ? null : language,
    },
  );
  const address = location.href.replace(/#.*$/, "") + here;
  useEffect(() => setState("ready"), [address]);
  const copy = async () => {
    try {
      if (!mayCopy()) throw new Error("the frame around the page has closed the clipboard");
      await navigator.clipboard.writeText(address);
      setState("copied");
    } catch {
      setState("shown");
    }
  };
  return (
    <span class="copy">
      <button type="button" onClick={copy}>
        {say(state === "copied" ? "copied" : "copyLink")}
      </button>
      <span class="offstage" role="status">
        {state === "copied" ? say("copied") : ""}
      </span>
      {state === "shown" ? (
        <input
          aria-label={say("linkHere")}
          readOnly
          value={address}
          onFocus={(event) => event.currentTarget.select()}
        />
      ) : null}
    </span>
  );
}
