/** Frame of the viewer: model, texts, errors, language and theme. */
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Frame, SkipLink, useViewChange } from "../parts/frame";
import type { Language } from "../parts/language";
import { hrefOf, useRoute, type Route } from "../parts/router";
import { Line } from "../parts/tokens";
import { get, ServerError } from "./api";
import { HeadView } from "./head-view";
import { Home } from "./home";
import { allStrings, errorStringName, useViewLocale } from "./language";
import { headName } from "./names";
import { RETRY, Store, StoreContext, useStore } from "./store";
import { TextPanel } from "./text-panel";
import type { State } from "./types";

export function App(props: { language: Language }): JSX.Element {
  const [language, setLanguage] = useState(props.language);
  const store = useLoadedStore();
  return (
    <Frame language={language} onLanguage={setLanguage} strings={allStrings}>
      {(switches) =>
        store instanceof Store ? (
          <StoreContext.Provider value={store}>
            <Viewer switches={switches} />
          </StoreContext.Provider>
        ) : (
          <Loading error={store} />
        )
      }
    </Frame>
  );
}

/** The store once the server has answered; until then an error message, empty if the server does not respond. */
function useLoadedStore(): Store | string | null {
  const [store, setStore] = useState<Store | string | null>(null);
  useEffect(() => {
    let timer = 0;
    const load = async () => {
      try {
        setStore(new Store(await get<State>("state")));
      } catch (error) {
        const offline = error instanceof ServerError && error.kind === "offline";
        setStore(offline ? "" : String(error instanceof Error ? error.message : error));
        if (offline) timer = setTimeout(load, RETRY);
      }
    };
    void load();
    return () => clearTimeout(timer);
  }, []);
  return store;
}

function Loading({ error }: { error: string | null }): JSX.Element {
  const { t } = useViewLocale();
  return (
    <main id="main">
      <h1>polyhead</h1>
      <p role="status">{error === null ? t("loading") : error || t("offline")}</p>
    </main>
  );
}

function Viewer({ switches }: { switches: JSX.Element }): JSX.Element {
  const { state, pendingRequests } = useStore();
  const { t } = useViewLocale();
  const route = useRoute();
  const main = useRef<HTMLElement>(null);
  const view = route.path[0] ?? "";
  useViewChange(view, () => main.current?.querySelector<HTMLElement>("h2")?.focus());
  return (
    <>
      <SkipLink main={main} />
      <header class="page-head">
        <div class="title">
          <h1>
            <Line text={state.model.name} />
          </h1>
          <FactLine />
        </div>
        <div class="switches">{switches}</div>
      </header>
      <TextPanel />
      <Errors />
      <p class="waiting" role="status">
        {pendingRequests ? t("waitingForServer", { count: pendingRequests }) : ""}
      </p>
      <Navigation route={route} />
      <main id="main" tabIndex={-1} ref={main}>
        {view === "head" ? <HeadView route={route} /> : <Home />}
      </main>
      <footer>{t("servedBy", { version: state.version })}</footer>
    </>
  );
}

function FactLine(): JSX.Element {
  const { model, context, context_reason, edits } = useStore().state;
  const { t, count, text } = useViewLocale();
  const about = { kind: model.class, dtype: model.dtype, device: model.device, parameters: count(model.parameters) };
  const most = t("factMost", { context: count(context) });
  return (
    <p class="facts">
      {t("factModel", about)} · {most} ({t(`context_${context_reason}`)})
      {edits ? <Line text={` · ${t("edited", { edits: text(edits) })}`} /> : null}
    </p>
  );
}

function Navigation({ route }: { route: Route }): JSX.Element {
  const { state } = useStore();
  const locale = useViewLocale();
  const isHead = route.path[0] === "head";
  return (
    <nav class="views" aria-label={locale.t("views")}>
      <a href={hrefOf([])} aria-current={isHead ? undefined : "page"}>
        {locale.t("allHeads")}
      </a>
      {isHead ? (
        <a href={hrefOf(route.path, route.query)} aria-current="page">
          {headName(state, [Number(route.path[1]), Number(route.path[2])], locale)}
        </a>
      ) : null}
    </nav>
  );
}

function Errors(): JSX.Element {
  const store = useStore();
  const { t } = useViewLocale();
  return (
    <div role="alert">
      {store.offline ? <p class="error">{t("offline")}</p> : null}
      {store.error ? (
        <p class="error">
          <strong>{t(errorStringName(store.error.kind))}</strong> <Line text={store.error.message} />{" "}
          <button type="button" onClick={() => store.dismissError()}>
            {t("close")}
          </button>
        </p>
      ) : null}
    </div>
  );
}
