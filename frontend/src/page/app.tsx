/** Frame of the page: model, navigation, language and theme. */
import type { JSX } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { Frame, SkipLink, useViewChange } from "../parts/frame";
import { useLocale, type Language, type StringName } from "../parts/language";
import { hrefOf, replaceQuery, useRoute, type Route } from "../parts/router";
import { strings } from "../parts/strings";
import { Line } from "../parts/tokens";
import { SimilarHeads } from "./similar-heads";
import { CopyLink } from "./copy-link";
import { FindingsView } from "./findings";
import { HeadCard } from "./head-card";
import { Importance } from "./importance";
import { ModelContext, useModel, type Model } from "./model";
import { Overview } from "./overview";
import { SyntaxView } from "./syntax";

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
  const { facts } = useModel().page;
  const { t } = useLocale();
  const main = useRef<HTMLElement>(null);
  const view = route.path.join("/") || "overview";
  useViewChange(view, () => {
    scrollTo(0, 0);
    main.current?.querySelector<HTMLElement>("h2")?.focus({ preventScroll: true });
  });
  return (
    <>
      <SkipLink main={main} />
      <header class="page-head">
        <div class="title">
          <h1>
            <Line text={facts.model} />
          </h1>
          <FactLine />
        </div>
        <div class="switches">
          {switches}
          <CopyLink route={route} />
        </div>
      </header>
      <Navigation route={route} />
      <main id="main" tabIndex={-1} ref={main}>
        <View route={route} />
      </main>
      <footer>{t("generatedBy", { version: facts.versions.polyhead ?? "" })}</footer>
    </>
  );
}

function View({ route }: { route: Route }): JSX.Element {
  const [name, ...rest] = route.path;
  switch (name) {
    case "head":
      return <HeadCard route={route} id={[Number(rest[0]), Number(rest[1])]} />;
    case "alike":
      return <SimilarHeads route={route} />;
    case "matters":
      return <Importance route={route} />;
    case "syntax":
      return <SyntaxView route={route} />;
    case "findings":
      return <FindingsView />;
    default:
      return <Overview route={route} />;
  }
}

function FactLine(): JSX.Element {
  const { page } = useModel();
  const { t, count, text } = useLocale();
  const layers = new Set(page.heads.map((head) => head.site)).size;
  const facts = [
    t("factHeads", { heads: count(page.heads.length), layers: count(layers) }),
    t("factTokens", { tokens: count(page.facts.tokens), documents: count(page.facts.documents) }),
    t("factContext", { context: count(page.facts.context) }),
  ];
  return (
    <p class="facts">
      {facts.join(" · ")}
      {page.facts.interrupted ? <strong> · {t("interrupted")}</strong> : null}
      {page.facts.edits ? <Line text={` · ${t("edited", { edits: text(page.facts.edits) })}`} /> : null}
    </p>
  );
}

function Navigation({ route }: { route: Route }): JSX.Element {
  const { page } = useModel();
  const { t } = useLocale();
  const views: [string, StringName, boolean][] = [
    ["overview", "overview", true],
    ["alike", "alike", true],
    ["matters", "matters", page.importance !== null],
    ["syntax", "syntax", page.syntax !== null],
    ["findings", "findings", true],
  ];
  const here = route.path[0] ?? "overview";
  return (
    <nav class="views" aria-label={t("views")}>
      {views
        .filter(([, , shown]) => shown)
        .map(([name, label]) => (
          <a href={hrefOf([name])} aria-current={here === name ? "page" : undefined}>
            {t(label)}
          </a>
        ))}
    </nav>
  );
}
