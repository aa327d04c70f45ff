/** View of one head, optionally beside another head or the other text. */
import type { JSX } from "preact";
import type { HeadId } from "../data";
import { LinesChoice } from "../parts/attention-lines";
import { currentRoute, go, hrefOf, replaceQuery, type Route } from "../parts/router";
import { plainToken } from "../parts/tokens";
import { AblatedHeads } from "./ablated-heads";
import { CompareChoice, comparedHead, Distance } from "./compare";
import { Grids } from "./grid";
import { HeadPanel } from "./head-panel";
import { useViewLocale } from "./language";
import { useMapView, type MapView } from "./map/position";
import { allHeads, headExists, headName } from "./names";
import { RoleList } from "./role-list";
import { useStore } from "./store";
import { useChosenWord, useLinkedWord } from "./text-words";
import { useTokenRows } from "./token-rows";
import { headKey, tokenAt, type Slot, type Trace } from "./types";

export function HeadView({ route }: { route: Route }): JSX.Element {
  const store = useStore();
  const locale = useViewLocale();
  const { t } = locale;
  const head: HeadId = [Number(route.path[1]), Number(route.path[2])];
  const slot: Slot = route.query.text === "B" ? "B" : "A";
  const trace = store.traces[slot];
  const chosen = useLinkedWord(trace, route.query.word);
  const rows = useTokenRows(trace, chosen.shown);
  const mapView = useMapView(route);
  if (!headExists(store.state, head)) return <h2 tabIndex={-1}>{t("noSuchHead")}</h2>;
  const name = headName(store.state, head, locale);
  if (!trace) {
    return (
      <>
        <h2 tabIndex={-1}>{name}</h2>
        <p class="lead">{store.loaded.length ? t("noSuchText", { slot }) : t("noText")}</p>
      </>
    );
  }
  const lines = route.query.draw === "lines";
  const other = comparedHead(route.query.with, store.state);
  const otherTrace = other ? store.traces[other.slot] : null;
  const token = chosen.shown ? tokenAt(trace, chosen.shown) : undefined;
  const linkTo = (id: HeadId) => hrefOf(["head", ...id], route.query);
  return (
    <div class="head-view">
      <div class="head-top">
        <h2 tabIndex={-1}>{name}</h2>
        <Neighbours head={head} linkTo={linkTo} />
        <button type="button" class="ablate" aria-pressed={store.isAblated(head)} onClick={() => store.toggle(head)}>
          {t(store.isAblated(head) ? "restoreHead" : "ablateHead")}
        </button>
        <CompareChoice route={route} head={head} slot={slot} other={other} />
        <LinesChoice lines={lines} onChange={(drawn) => replaceQuery(currentRoute(), { draw: drawn ? "lines" : null })} />
      </div>
      <RoleList head={head} />
      <div class="head-body">
        <div class={`panels count-${otherTrace ? 2 : 1}`}>
          <HeadPanel {...{ trace, head, chosen, rows, mapView, lines }} titled={otherTrace !== null} />
          {other && otherTrace === trace ? (
            <HeadPanel {...{ trace, chosen, rows, mapView, lines }} head={other.head} titled />
          ) : other && otherTrace ? (
            <PanelOfOtherText trace={otherTrace} head={other.head} mapView={mapView} lines={lines} />
          ) : null}
        </div>
        <aside class="strip" aria-label={t("allHeads")}>
          <Grids trace={trace} title={t("allHeads")} narrow marked={head} onPick={(picked) => go(linkTo(picked))} />
          <AblatedHeads />
        </aside>
      </div>
      {other && otherTrace ? <Distance one={{ slot, head }} other={other} /> : null}
      {rows && token !== undefined ? (
        <section class="word-in-heads">
          <h3>
            <bdi>{t("wordInHeads", { word: plainToken(token) })}</bdi>
          </h3>
          <p class="note">{t("wordInHeadsAbout")}</p>
          <div class="two-ways">
            <Grids trace={trace} title={t("attendsTo")} word={{ rows, side: "attends", token }} marked={head} />
            <Grids trace={trace} title={t("attendedBy")} word={{ rows, side: "attended", token }} marked={head} />
          </div>
        </section>
      ) : null}
    </div>
  );
}

function Neighbours({ head, linkTo }: { head: HeadId; linkTo: (head: HeadId) => string }): JSX.Element {
  const { state } = useStore();
  const { t } = useViewLocale();
  const all = allHeads(state);
  const index = all.findIndex((each) => headKey(each) === headKey(head));
  const [before, after] = [all[index - 1], all[index + 1]];
  return (
    <span class="neighbours">
      {before ? (
        <a href={linkTo(before)} aria-label={t("previousHead")}>
          ←
        </a>
      ) : null}
      {after ? (
        <a href={linkTo(after)} aria-label={t("nextHead")}>
          →
        </a>
      ) : null}
    </span>
  );
}

/** The words of another text are chosen separately. */
function PanelOfOtherText(props: { trace: Trace; head: HeadId; mapView: MapView; lines: boolean }): JSX.Element {
  const chosen = useChosenWord(props.trace);
  const rows = useTokenRows(props.trace, chosen.shown);
  return <HeadPanel {...props} chosen={chosen} rows={rows} titled />;
}
