/** The address of the view, to be sent to somebody. */
import type { JSX } from "preact";
import { CopyButton } from "../parts/copying";
import { useWords } from "../parts/language";
import { changed, type Route } from "../parts/router";
import { useModel } from "./model";

export function CopyLink({ route }: { route: Route }): JSX.Element {
  const { page } = useModel();
  const { say, language } = useWords();
  const here = changed(
    { ...route, path: route.path.length ? route.path : ["overview"] },
    {
      lang: language === page.lang ? null : language,
    },
  );
  const address = location.href.replace(/#.*$/, "") + here;
  return <CopyButton text={address} label={say("copyLink")} about={say("linkHere")} />;
}
