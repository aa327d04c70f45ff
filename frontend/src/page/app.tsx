/** The frame around every view: what was looked at, where one can go, language and theme. */
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { useWords, WordsContext, wordsOf, type Language, type StringName } from "../parts/language";
import { changed, go, hrefOf, useRoute, type Route } from "../parts/router";
import { DarkContext, useTheme, type Theme } from "../parts/theme";
import { Line } from "../parts/tokens";
import { AlikeView } from "./alike";
import { FindingsView } from "./findings";
import { HeadCard } from "./head-card";
import { MattersView } from "./matters";
import { ModelContext, useModel, type Model } from "./model";
import { Overview } from "./overview";
import { SyntaxView } from "./syntax";

const THEMES: Theme[] = ["auto", "light", "dark"];
const LANGUAGES: [Language, string][] = [
  ["en", "English"],
  ["zh", "中文"],
];

export function App({ model }: { model: Model }): JSX.Element {
  const route = useRoute();
  const asked = route.query.lang;
  const [language, setLanguage] = useState<Language>(model.page.lang);
  const words = useMemo(() => wordsOf(language), [language]);
  const { theme, dark, choose } = useTheme();
  const main = useRef<HTMLElement>(null);
  const view = route.path.join("/") || "overview";
  const first = useRef(true);

  useLayoutEffect(() => {
    if (asked === "en" || asked === "zh") setLanguage(asked);
  }, [asked]);
  useLayoutEffect(() => {
    document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  }, [language]);
  const chooseLanguage = (chosen: Language) => {
    setLanguage(chosen);
    if (asked) go(changed(route, { lang: null }), true);
  };
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
    <WordsContext.Provider value={words}>
      <DarkContext.Provider value={dark}>
        <ModelContext.Provider value={model}>
          <a
            class="skip"
            href="#main"
            onClick={(event) => {
              event.preventDefault();
              main.current?.focus();
            }}
          >
            {words.say("skip")}
          </a>
          <header class="page-head">
            <div class="title">
              <h1>
                <Line text={model.page.facts.model} />
              </h1>
              <FactLine />
            </div>
            <div class="switches">
              <Switch
                label={words.say("language")}
                value={language}
                onChange={(value) => chooseLanguage(value as Language)}
              >
                {LANGUAGES.map(([value, name]) => (
                  <option value={value}>{name}</option>
                ))}
              </Switch>
              <Switch label={words.say("theme")} value={theme} onChange={(value) => choose(value as Theme)}>
                {THEMES.map((value) => (
                  <option value={value}>{words.say(`theme_${value}`)}</option>
                ))}
              </Switch>
              <CopyLink route={route} language={language} />
            </div>
          </header>
          <Navigation route={route} />
          <main id="main" tabIndex={-1} ref={main}>
            <View route={route} />
          </main>
          <footer>{words.say("madeBy", { version: model.page.facts.versions.polyhead ?? "" })}</footer>
        </ModelContext.Provider>
      </DarkContext.Provider>
    </WordsContext.Provider>
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
  const { say, count } = useWords();
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

function Switch(props: {
  label: string;
  value: string;
  onChange: (value: string) => void;
  children: ComponentChildren;
}): JSX.Element {
  return (
    <select
      aria-label={props.label}
      value={props.value}
      onChange={(event) => props.onChange(event.currentTarget.value)}
    >
      {props.children}
    </select>
  );
}

/** A frame may close the clipboard; browsers that cannot tell are asked by trying. */
function mayCopy(): boolean {
  const policy = (document as { featurePolicy?: { allowsFeature: (name: string) => boolean } }).featurePolicy;
  return policy ? policy.allowsFeature("clipboard-write") : true;
}

/** Copies the address of this view; where the clipboard is closed, shows it to be copied by hand. */
function CopyLink({ route, language }: { route: Route; language: Language }): JSX.Element {
  const { page } = useModel();
  const { say } = useWords();
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
