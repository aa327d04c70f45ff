/** Button that copies the link to the current view. */
import type { JSX } from "preact";
import { CopyButton } from "../parts/copy-button";
import { useLocale } from "../parts/language";
import { withQuery, type Route } from "../parts/router";
import { useModel } from "./model";

export function CopyLink({ route }: { route: Route }): JSX.Element {
  const { page } = useModel();
  const { t, language } = useLocale();
  const path = route.path.length ? route.path : ["overview"];
  const hash = withQuery({ ...route, path }, { lang: language === page.lang ? null : language });
  return <CopyButton text={location.href.replace(/#.*$/, "") + hash} label={t("copyLink")} about={t("linkHere")} />;
}
