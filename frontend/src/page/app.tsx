/** Frame of the page: model, navigation, language and theme. */
import type { ComponentType, JSX } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";
import { CopyButton } from "../parts/copy-button";
import { Frame, Shell } from "../parts/frame";
import { useLocale, type Language } from "../parts/language";
import { hrefOf, replaceQuery, useRoute, withQuery, type Route } from "../parts/router";
import { strings } from "../parts/strings";
import { Line } from "../parts/tokens";
import { Charts } from "./charts";
import { FindingsView } from "./findings";
import { HeadCard } from "./head-card";
import { Importance } from "./importance";
import { ModelContext, useModel, type Model } from "./model";
import { Overview } from "./overview";
import { SimilarHeads } from "./similar-heads";
import { SyntaxView } from "./syntax";

const VIEWS = {
  overview: Overview,
  charts: Charts,
  similar: SimilarHeads,
  importance: Importance,
  syntax: SyntaxView,
  findings: FindingsView,
} satisfies Record<string, ComponentType<{ route: Route }>>;
const VIEW_NAMES = Object.keys(VIEWS) as (keyof typeof VIEWS)[];

export function App({ model }: { model: Model }): JSX.Element {
  const route = useRoute();
  const requested = route.query.lang;
  const [language, setLanguage] = useState<Language>(model.page.lang);
  useLayoutEffect(() => {
    if (requested === "en" || requested === "zh") setLanguage(requested);
  }, [requested]);
  const chooseLanguage = (chosen: Language) => {
    setLanguage(chosen);
    if (requested) replaceQuery(route, { lang: null });
  };
  return (
    <Frame language={language} onLanguage={chooseLanguage} strings={strings}>
      {(switches) => (
        <ModelContext.Provider value={model}>
          <Page route={route} switches={switches} />
        </ModelContext.Provider>
      )}
    </Frame>
  );
}

function Page({ route, switches }: { route: Route; switches: JSX.Element }): JSX.Element {
  const { page } = useModel();
  const { t } = useLocale();
  const path = route.path.length ? route.path : ["overview"];
  const [name, site, head] = path;
  const View = VIEWS[VIEW_NAMES.find((one) => one === name) ?? "overview"];
  const available = VIEW_NAMES.filter(
    (one) => (one !== "importance" || page.importance) && (one !== "syntax" || page.syntax),
  );
  return (
    <Shell
      title={page.facts.model}
      facts={<Facts />}
      switches={
        <>
          {switches}
          <CopyLink route={{ ...route, path }} />
        </>
      }
      links={available.map((one) => ({ href: hrefOf([one]), label: t(one), current: one === name }))}
      view={path.join("/")}
      scrolls
      footer={t("generatedBy", { version: page.facts.versions.polyhead ?? "" })}
    >
      {name === "head" ? <HeadCard route={route} id={[Number(site), Number(head)]} /> : <View route={route} />}
    </Shell>
  );
}

function Facts(): JSX.Element {
  const { page } = useModel();
  const { t, count, text } = useLocale();
  const layers = new Set(page.heads.map((head) => head.site)).size;
  const facts = [
    t("factHeads", { heads: count(page.heads.length), layers: count(layers) }),
    t("factTokens", { tokens: count(page.facts.tokens), documents: count(page.facts.documents) }),
    t("factContext", { context: count(page.facts.context) }),
  ];
  return (
    <>
      {facts.join(" · ")}
      {page.facts.interrupted ? <strong> · {t("interrupted")}</strong> : null}
      {page.facts.edits ? <Line text={` · ${t("edited", { edits: text(page.facts.edits) })}`} /> : null}
    </>
  );
}

/** Copies the link to the current view. */
function CopyLink({ route }: { route: Route }): JSX.Element {
  const { page } = useModel();
  const { t, language } = useLocale();
  const hash = withQuery(route, { lang: language === page.lang ? null : language });
  return <CopyButton text={location.href.replace(/#.*$/, "") + hash} label={t("copyLink")} about={t("linkHere")} />;
}
