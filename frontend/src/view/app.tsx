/** The frame around every view: the model, the texts, what went wrong, language and theme. */
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Frame, SkipLink } from "../parts/frame";
import type { Language } from "../parts/language";
import { hrefOf, useRoute, type Route } from "../parts/router";
import { Line } from "../parts/tokens";
import { get, ServerError } from "./api";
import { AskPanel } from "./ask";
import { HeadView } from "./head-view";
import { Home } from "./home";
import { troubleName, useView } from "./language";
import { headName } from "./names";
import { Store, StoreContext, useStore } from "./store";
import type { HeadAt, State } from "./types";

const EVERY = 2000; // milliseconds between two looks whether the server is there

export function App(props: { language: Language }): JSX.Element {
  const [language, setLanguage] = useState(props.language);
  const store = useLoaded();
  return (
    <Frame language={language} onLanguage={setLanguage}>
      {(switches) =>
        store instanceof Store ? (
          <StoreContext.Provider value={store}>
            <Viewer switches={switches} />
          </StoreContext.Provider>
        ) : (
          <Waiting trouble={store} />
        )
      }
    </Frame>
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

function Viewer({ switches }: { switches: JSX.Element }): JSX.Element {
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
      <SkipLink main={main} />
      <header class="view-head">
        <div class="title">
          <h1>
            <Line text={store.state.model.name} />
          </h1>
          <FactLine />
        </div>
        <div class="switches">{switches}</div>
      </header>
      <AskPanel />
      <Troubles />
      <p class="waiting" role="status">
        {store.waitingQuestions ? say("waitingForServer", { count: store.waitingQuestions }) : ""}
      </p>
      <Navigation route={route} />
      <main id="main" tabIndex={-1} ref={main}>
        {view === "head" ? <HeadView route={route} /> : <Home />}
      </main>
      <footer>{say("servedBy", { version: store.state.version })}</footer>
    </>
  );
}

function FactLine(): JSX.Element {
  const { model, context, context_reason, edits } = useStore().state;
  const { say, count, text } = useView();
  const about = { kind: model.class, dtype: model.dtype, device: model.device, parameters: count(model.parameters) };
  const most = say("factMost", { context: count(context) });
  return (
    <p class="facts">
      {say("factModel", about)} · {most} ({say(`context_${context_reason}`)})
      {edits ? <Line text={` · ${say("edited", { edits: text(edits) })}`} /> : null}
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
