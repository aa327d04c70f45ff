/** Frame of the viewer: model, texts, errors, language and theme. */
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Frame, Shell } from "../parts/frame";
import type { Language } from "../parts/language";
import { hrefOf, useRoute } from "../parts/router";
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
  const locale = useViewLocale();
  const { t } = locale;
  const route = useRoute();
  const [view = "", layer, head] = route.path;
  const isHead = view === "head";
  const name = headName(state, [Number(layer), Number(head)], locale);
  const links = [
    { href: hrefOf([]), label: t("allHeads"), current: !isHead },
    ...(isHead ? [{ href: hrefOf(route.path, route.query), label: name, current: true }] : []),
  ];
  const tools = (
    <>
      <TextPanel />
      <Errors />
      <p class="waiting" role="status">
        {pendingRequests ? t("waitingForServer", { count: pendingRequests }) : ""}
      </p>
    </>
  );
  const footer = t("servedBy", { version: state.version });
  return (
    <Shell title={state.model.name} facts={<Facts />} {...{ switches, tools, links, view, footer }}>
      {isHead ? <HeadView route={route} /> : <Home />}
    </Shell>
  );
}

function Facts(): JSX.Element {
  const { model, context, context_reason, edits } = useStore().state;
  const { t, count, text } = useViewLocale();
  const about = { kind: model.class, dtype: model.dtype, device: model.device, parameters: count(model.parameters) };
  const most = t("factMost", { context: count(context) });
  return (
    <>
      {t("factModel", about)} · {most} ({t(`context_${context_reason}`)})
      {edits ? <Line text={` · ${t("edited", { edits: text(edits) })}`} /> : null}
    </>
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
