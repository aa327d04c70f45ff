/** One head: its words, its map, and beside it another head, another layer or the other text. */
import type { JSX } from "preact";
import { go, hrefOf, type Route } from "../parts/router";
import { plainToken } from "../parts/tokens";
import { CompareChoice, Distance, otherOf, type Other } from "./compare";
import { Grids } from "./grid";
import { HeadPanel } from "./head-panel";
import { useView } from "./language";
import { useOutlook, type Outlook } from "./map/position";
import { allHeads, headExists, headName } from "./names";
import { OffHeads } from "./off-heads";
import { RoleList } from "./role-list";
import { useStore } from "./store";
import { useChosen, useChosenInLink } from "./text-words";
import { axisOf, headKey, type HeadAt, type Reading, type Slot } from "./types";
import { useWord } from "./words";

export function HeadView({ route }: { route: Route }): JSX.Element {
  const store = useStore();
  const words = useView();
  const { say } = words;
  const head: HeadAt = [Number(route.path[1]), Number(route.path[2])];
  const slot: Slot = route.query.text === "B" ? "B" : "A";
  const reading = store.readings[slot];
  const chosen = useChosenInLink(reading, route.query.word);
  const rows = useWord(reading, chosen.shown);
  const outlook = useOutlook(route);
  if (!headExists(store.state, head)) return <h2 tabIndex={-1}>{say("noSuchHead")}</h2>;
  const name = headName(store.state, head, words);
  if (!reading) {
    return (
      <>
        <h2 tabIndex={-1}>{name}</h2>
        <p class="lead">{store.readings.A || store.readings.B ? say("noSuchText", { slot }) : say("nothingRead")}</p>
      </>
    );
  }
  const other = otherOf(route.query.with, store.state);
  const beside = other ? store.readings[other.slot] : null;
  const token = chosen.shown ? axisOf(reading, chosen.shown.axis).tokens[chosen.shown.index] : undefined;
  const linkTo = ([place, number]: HeadAt) => hrefOf(["head", place, number], route.query);
  return (
    <div class="head-view">
      <div class="head-top">
        <h2 tabIndex={-1}>{name}</h2>
        <Neighbours head={head} linkTo={linkTo} />
        <button type="button" aria-pressed={store.isOff(head)} class="gate" onClick={() => store.toggle(head)}>
          {say(store.isOff(head) ? "switchOn" : "switchOff")}
        </button>
        <CompareChoice route={route} head={head} slot={slot} other={other} />
      </div>
      <RoleList head={head} />
      <div class="head-body">
        <div class={`panels count-${beside ? 2 : 1}`}>
          <HeadPanel {...{ reading, head, chosen, rows, outlook }} titled={beside !== null} />
          {other && beside ? (
            beside === reading ? (
              <HeadPanel reading={beside} head={other.head} {...{ chosen, rows, outlook }} titled />
            ) : (
              <PanelOfOtherText reading={beside} other={other} outlook={outlook} />
            )
          ) : null}
        </div>
        <aside class="strip" aria-label={say("stripOfHeads")}>
          <Grids
            reading={reading}
            title={say("stripOfHeads")}
            narrow
            marked={head}
            onPick={(picked) => go(linkTo(picked))}
          />
          <OffHeads />
        </aside>
      </div>
      {other && beside ? <Distance one={{ slot, head }} other={other} /> : null}
      {rows && token !== undefined ? (
        <section class="word-in-heads">
          <h3>
            <bdi>{say("wordInHeads", { word: plainToken(token) })}</bdi>
          </h3>
          <p class="note">{say("wordInHeadsAbout")}</p>
          <div class="two-ways">
            {(["attends", "attended"] as const).map((side) => (
              <Grids
                key={side}
                reading={reading}
                title={say(side === "attends" ? "looksAt" : "isSeenBy")}
                word={{ rows, side, token }}
                marked={head}
              />
            ))}
          </div>
        </section>
      ) : null}
    </div>
  );
}

function Neighbours({ head, linkTo }: { head: HeadAt; linkTo: (head: HeadAt) => string }): JSX.Element {
  const { state } = useStore();
  const { say } = useView();
  const all = allHeads(state);
  const at = all.findIndex((each) => headKey(each) === headKey(head));
  const [before, after] = [all[at - 1], all[at + 1]];
  return (
    <span class="neighbours">
      {before ? (
        <a href={linkTo(before)} aria-label={say("previousHead")}>
          ←
        </a>
      ) : null}
      {after ? (
        <a href={linkTo(after)} aria-label={say("nextHead")}>
          →
        </a>
      ) : null}
    </span>
  );
}

/** Another text has words of its own to choose from. */
function PanelOfOtherText(props: { reading: Reading; other: Other; outlook: Outlook }): JSX.Element {
  const { reading, other, outlook } = props;
  const chosen = useChosen(reading);
  const rows = useWord(reading, chosen.shown);
  return <HeadPanel reading={reading} head={other.head} {...{ chosen, rows, outlook }} titled />;
}
