/** The frame around every view: what was looked at, where one can go, language and theme. */
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Frame, SkipLink } from "../parts/frame";
import { useWords, type Language, type StringName } from "../parts/language";
import { changed, go, hrefOf, useRoute, type Route } from "../parts/router";
import { Line } from "../parts/tokens";
import { AlikeView } from "./alike";
import { CopyLink } from "./copy-link";
import { FindingsView } from "./findings";
import { HeadCard } from "./head-card";
import { MattersView } from "./matters";
import { ModelContext, useModel, type Model } from "./model";
import { Overview } from "./overview";
import { SyntaxView } from "./syntax";

export function App({ model }: { model: Model }): JSX.Element {
  const route = useRoute();
  const asked = route.query.lang;
  const [language, setLanguage] = useState<Language>(model.page.lang);
  useLayoutEffect(() => {
    if (asked === "en" || asked === "zh") setLanguage(asked);
  }, [asked]);
  const chooseLanguage = (chosen: Language) => {
    setLanguage(chosen);
    if (asked) go(changed(route, { lang: null }), true);
  };
  return (
    <Frame language={language} onLanguage={chooseLanguage}>
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
  const { say } = useWords();
  const main = useRef<HTMLElement>(null);
  const view = route.path.join("/") || "overview";
  const first = useRef(true);
  useEffect(() => {
    if (first.current) {
      first.current = false;
      return;
    }
    // A new view starts at its top, for the eye and for a screen reader.
    scrollTo(0, 0);
    main.current?.querySelector<HTMLElement>("h2")?.focus({ preventScroll: true });
  }, [view]);
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
      <footer>{say("madeBy", { version: facts.versions.polyhead ?? "" })}</footer>
    </>
  );
}

function View({ route }: { route: Route }): JSX.Element {
  const [name, ...rest] = route.path;
  switch (name) {
    case "head":
      return <HeadCard route={route} place={[Number(rest[0]), Number(rest[1])]} />;
    case "alike":
      return <AlikeView route={route} />;
    case "matters":
      return <MattersView route={route} />;
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
  const { say, count, text } = useWords();
  const layers = new Set(page.heads.map((head) => head.site)).size;
  const facts = [
    say("factHeads", { heads: count(page.heads.length), layers: count(layers) }),
    say("factTokens", { tokens: count(page.facts.tokens), documents: count(page.facts.documents) }),
    say("factContext", { context: count(page.facts.context) }),
  ];
  return (
    <p class="facts">
      {facts.join(" · ")}
      {page.facts.interrupted ? <strong> · {say("interrupted")}</strong> : null}
      {page.facts.edits ? <Line text={` · ${say("edited", { edits: text(page.facts.edits) })}`} /> : null}
    </p>
  );
}

function Navigation({ route }: { route: Route }): JSX.Element {
  const { page } = useModel();
  const { say } = useWords();
  const views: [string, StringName, boolean][] = [
    ["overview", "overview", true],
    ["alike", "alike", true],
    ["matters", "matters", page.importance !== null],
    ["syntax", "syntax", page.syntax !== null],
    ["findings", "findings", true],
  ];
  const here = route.path[0] ?? "overview";
  return (
    <nav class="views" aria-label={say("views")}>
      {views
        .filter(([, , shown]) => shown)
        .map(([name, label]) => (
          <a href={hrefOf([name])} aria-current={here === name ? "page" : undefined}>
            {say(label)}
          </a>
        ))}
    </nav>
  );
}
