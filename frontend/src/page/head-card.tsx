/** Everything about one head. */
import type { JSX } from "preact";
import type { Place } from "../data";
import { useWords } from "../parts/language";
import { hrefOf, type Route } from "../parts/router";
import { Line, Token } from "../parts/tokens";
import { HeadExamples } from "./head-examples";
import { BlockMapFigure, OffsetFigure } from "./head-looks";
import { HeadNumbers } from "./head-numbers";
import { HeadRoles } from "./head-roles";
import { headHref, useModel, type Model } from "./model";
import { PlaceLink } from "./place-link";
import { RoleChips } from "./role-chips";

export function HeadCard({ place, route }: { place: Place; route: Route }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const { say, text } = words;
  const head = model.head(place);
  if (!head) {
    return (
      <>
        <h2 tabIndex={-1}>{say("noSuchHead")}</h2>
        <p>
          <a href={hrefOf(["overview"])}>{say("toOverview")}</a>
        </p>
      </>
    );
  }
  const held = model.held(head);
  return (
    <article class="card" aria-labelledby="head-name" key={`${place[0]}.${place[1]}`}>
      <div class="card-head">
        <Neighbours model={model} place={place} />
        <h2 id="head-name" tabIndex={-1}>
          {model.long(place, words)}
        </h2>
        <RoleChips head={head} />
      </div>
      <div class="summary">
        {held.length ? (
          <ul>
            {held.map((score) => (
              <li key={score.role}>
                <Line text={text(score.evidence)} />
              </li>
            ))}
          </ul>
        ) : (
          <p>{say("noRoleHere")}</p>
        )}
      </div>
      <div class="card-body">
        <HeadExamples place={place} route={route} />
        <BlockMapFigure place={place} />
        <OffsetFigure place={place} />
        <HeadRoles head={head} />
        <div class="side">
          <LookAlikes place={place} />
          <TopKeys place={place} />
        </div>
        <HeadNumbers head={head} />
      </div>
    </article>
  );
}

function Neighbours({ model, place }: { model: Model; place: Place }): JSX.Element {
  const words = useWords();
  const { heads } = model.page;
  const index = heads.findIndex((head) => head.site === place[0] && head.head === place[1]);
  const [before, after] = [heads[index - 1], heads[index + 1]];
  return (
    <nav class="neighbours" aria-label={words.say("neighbours")}>
      {before ? (
        <a href={headHref([before.site, before.head])} rel="prev">
          ← {model.short([before.site, before.head], words)}
          <span class="offstage"> {words.say("previousHead")}</span>
        </a>
      ) : null}
      <a href={hrefOf(["overview"])}>{words.say("allHeads")}</a>
      {after ? (
        <a href={headHref([after.site, after.head])} rel="next">
          {model.short([after.site, after.head], words)} →<span class="offstage"> {words.say("nextHead")}</span>
        </a>
      ) : null}
    </nav>
  );
}

function LookAlikes({ place }: { place: Place }): JSX.Element | null {
  const model = useModel();
  const { say, number } = useWords();
  const alike = model.head(place)?.alike ?? [];
  if (!alike.length) return null;
  const likeness = model.page.likeness;
  return (
    <section class="panel" aria-labelledby="look-alikes">
      <h3 id="look-alikes">{say("lookAlikes")}</h3>
      <p class="note">
        {say("lookAlikesAbout")}{" "}
        {likeness
          ? say("likenessShort", { threshold: number(likeness.threshold), chance: number(likeness.null) })
          : null}
      </p>
      <ol class="bars">
        {alike.map((one) => (
          <li key={one.place.join(".")} style={{ "--share": String(Math.abs(one.cosine)) }}>
            <PlaceLink place={one.place} />
            <span class="muted">{one.across ? say("otherLayer") : say("sameLayer")}</span>
            <span class="value">{number(one.cosine)}</span>
          </li>
        ))}
      </ol>
    </section>
  );
}

function TopKeys({ place }: { place: Place }): JSX.Element | null {
  const model = useModel();
  const { say, number } = useWords();
  const keys = model.head(place)?.top_keys ?? [];
  if (!keys.length) return null;
  return (
    <section class="panel" aria-labelledby="top-keys">
      <h3 id="top-keys">{say("topKeys")}</h3>
      <p class="note">{say("topKeysAbout")}</p>
      <ol class="bars">
        {keys.map((key, i) => (
          <li key={i} style={{ "--share": String(key.share) }}>
            <Token text={key.text} />
            <span class="value">{number(key.share, "share")}</span>
          </li>
        ))}
      </ol>
    </section>
  );
}
