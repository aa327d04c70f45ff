/** The frame around every view: the model, the texts, what went wrong, language and theme. */
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { WordsContext, wordsOf, type Language } from "../parts/language";
import { hrefOf, useRoute, type Route } from "../parts/router";
import { DarkContext, useTheme, type Theme } from "../parts/theme";
import { Line } from "../parts/tokens";
import { get, ServerError } from "./api";
import { AskPanel } from "./ask";
import { HeadView } from "./head-view";
import { Home } from "./home";
import { troubleName, useView } from "./language";
import { headName } from "./names";
import { Store, StoreContext, useStore } from "./store";
import type { HeadAt, State } from "./types";

const THEMES: Theme[] = ["auto", "light", "dark"];
const LANGUAGES: [Language, string][] = [
  ["en", "English"],
  ["zh", "中文"],
];
const EVERY = 2000; // milliseconds between two looks whether the server is there

export function App(props: { language: Language }): JSX.Element {
  const [language, setLanguage] = useState(props.language);
  const words = useMemo(() => wordsOf(language), [language]);
  const { theme, dark, choose } = useTheme();
  const store = useLoaded();
  useLayoutEffect(() => {
    document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  }, [language]);
  const switches = (
    <div class="switches">
      <Switch label={words.say("language")} value={language} onChange={(value) => setLanguage(value as Language)}>
        {LANGUAGES.map(([value, name]) => (
          <option value={value}>{name}</option>
        ))}
      </Switch>
      <Switch label={words.say("theme")} value={theme} onChange={(value) => choose(value as Theme)}>
        {THEMES.map((value) => (
          <option value={value}>{words.say(`theme_${value}`)}</option>
        ))}
      </Switch>
    </div>
  );
  return (
    <WordsContext.Provider value={words}>
      <DarkContext.Provider value={dark}>
        {store instanceof Store ? (
          <StoreContext.Provider value={store}>
            <Frame switches={switches} />
          </StoreContext.Provider>
        ) : (
          <Waiting trouble={store} />
        )}
      </DarkContext.Provider>
    </WordsContext.Provider>
  );
}

/** The store when the server has answered, until then what is wrong, if anything is. */
function useLoaded(): Store | string | null {
  const [found, setFound] = useState<Store | string | null>(null);
  useEffect(() => {
    let timer = 0;
    const load = async () => {
      try {
        setFound(new Store(await get<State>("state")));
      } catch (error) {
        const away = error instanceof ServerError && error.kind === "offline";
        setFound(away ? "" : String(error instanceof Error ? error.message : error));
        if (away) timer = setTimeout(load, EVERY);
      }
    };
    void load();
    return () => clearTimeout(timer);
  }, []);
  return found;
}

function Waiting({ trouble }: { trouble: string | null }): JSX.Element {
  const { say } = useView();
  return (
    <main id="main">
      <h1>polyhead</h1>
      <p role="status">{trouble === null ? say("loading") : trouble || say("offline")}</p>
    </main>
  );
}

function Frame({ switches }: { switches: JSX.Element }): JSX.Element {
  const store = useStore();
  const { say } = useView();
  const route = useRoute();
  const main = useRef<HTMLElement>(null);
  const first = useRef(true);
  const view = route.path[0] ?? "";
  useEffect(() => {
    if (first.current) {
      first.current = false;
      return;
    }
    // A new view is told to a screen reader; the text above stays where it is.
    main.current?.querySelector<HTMLElement>("h2")?.focus();
  }, [view]);
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          event.preventDefault();
          main.current?.focus();
        }}
      >
        {say("skip")}
      </a>
      <header class="view-head">
        <div class="title">
          <h1>
            <Line text={store.state.model.name} />
          </h1>
          <FactLine />
        </div>
        {switches}
      </header>
      <AskPanel />
      <Troubles />
      <Navigation route={route} />
      <main id="main" tabIndex={-1} ref={main}>
        {view === "head" ? <HeadView route={route} /> : <Home />}
      </main>
      <footer>{say("servedBy", { version: store.state.version })}</footer>
    </>
  );
}

function FactLine(): JSX.Element {
  const { model, context, context_reason } = useStore().state;
  const { say, count } = useView();
  const about = { kind: model.class, dtype: model.dtype, device: model.device, parameters: count(model.parameters) };
  const most = say("factMost", { context: count(context) });
  return (
    <p class="facts">
      {say("factModel", about)} · {most} ({say(`context_${context_reason}`)})
    </p>
  );
}

function Navigation({ route }: { route: Route }): JSX.Element {
  const { state } = useStore();
  const words = useView();
  const head: HeadAt = [Number(route.path[1]), Number(route.path[2])];
  const isHead = route.path[0] === "head";
  return (
    <nav class="views" aria-label={words.say("views")}>
      <a href={hrefOf([])} aria-current={isHead ? undefined : "page"}>
        {words.say("allHeads")}
      </a>
      {isHead ? (
        <a href={hrefOf(route.path, route.query)} aria-current="page">
          {headName(state, head, words)}
        </a>
      ) : null}
    </nav>
  );
}

function Troubles(): JSX.Element {
  const store = useStore();
  const { say } = useView();
  return (
    <div class="troubles" role="alert">
      {store.offline ? <p class="trouble">{say("offline")}</p> : null}
      {store.trouble ? (
        <p class="trouble">
          <strong>{say(troubleName(store.trouble.kind))}</strong> <Line text={store.trouble.message} />{" "}
          <button type="button" onClick={() => store.forgive()}>
            {say("close")}
          </button>
        </p>
      ) : null}
    </div>
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
