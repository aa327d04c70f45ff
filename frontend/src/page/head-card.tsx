/** The card of one head. */
import type { ComponentChildren, JSX } from "preact";
import type { HeadId } from "../data";
import { useLocale } from "../parts/language";
import { hrefOf, type Route } from "../parts/router";
import { Line, Token } from "../parts/tokens";
import { BlockMapFigure, OffsetFigure } from "./head-attention";
import { HeadExamples } from "./head-examples";
import { HeadLink } from "./head-link";
import { HeadNumbers } from "./head-numbers";
import { HeadRoles } from "./head-roles";
import { headHref, idOf, keyOf, useModel } from "./model";
import { RoleChips } from "./role-chips";

export function HeadCard({ id, route }: { id: HeadId; route: Route }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t, text, number } = locale;
  const head = model.head(id);
  if (!head) {
    return (
      <>
        <h2 tabIndex={-1}>{t("noSuchHead")}</h2>
        <p>
          <a href={hrefOf(["overview"])}>{t("toOverview")}</a>
        </p>
      </>
    );
  }
  const roles = model.rolesOf(head);
  return (
    <article class="card" aria-labelledby="head-name" key={keyOf(id)}>
      <div class="card-head">
        <Neighbours id={id} />
        <h2 id="head-name" tabIndex={-1}>
          {model.fullName(id, locale)}
        </h2>
        <RoleChips head={head} />
      </div>
      <div class="summary">
        {roles.length ? (
          <ul>
            {roles.map((score) => (
              <li key={score.role}>
                <Line text={text(score.evidence)} />
              </li>
            ))}
          </ul>
        ) : (
          <p>{t("noRoleSupported")}</p>
        )}
      </div>
      <div class="card-body">
        <HeadExamples id={id} route={route} />
        <BlockMapFigure id={id} />
        <OffsetFigure id={id} />
        <HeadRoles head={head} />
        <div class="side">
          <Bars
            name="look-alikes"
            title={t("mostSimilarHeads")}
            note={t("mostSimilarAbout")}
            bars={head.similar.map((other) => ({
              share: Math.abs(other.cosine),
              value: number(other.cosine),
              content: (
                <>
                  <HeadLink id={other.head} />
                  <span class="muted">{other.across ? t("otherLayer") : t("sameLayer")}</span>
                </>
              ),
            }))}
          />
          <Bars
            name="top-keys"
            title={t("topKeys")}
            note={t("topKeysAbout")}
            bars={head.top_keys.map((key) => ({
              share: key.share,
              value: number(key.share, "share"),
              content: <Token text={key.text} />,
            }))}
          />
        </div>
        <HeadNumbers head={head} />
      </div>
    </article>
  );
}

function Neighbours({ id }: { id: HeadId }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { heads } = model.page;
  const index = heads.findIndex((head) => keyOf(idOf(head)) === keyOf(id));
  const [before, after] = [heads[index - 1], heads[index + 1]];
  return (
    <nav class="neighbours" aria-label={locale.t("neighbours")}>
      {before ? (
        <a href={headHref(idOf(before))} rel="prev">
          ← {model.shortName(idOf(before), locale)}
          <span class="offstage"> {locale.t("previousHead")}</span>
        </a>
      ) : null}
      <a href={hrefOf(["overview"])}>{locale.t("allHeads")}</a>
      {after ? (
        <a href={headHref(idOf(after))} rel="next">
          {model.shortName(idOf(after), locale)} →<span class="offstage"> {locale.t("nextHead")}</span>
        </a>
      ) : null}
    </nav>
  );
}

interface BarsProps {
  name: string;
  title: string;
  note: string;
  bars: { content: ComponentChildren; share: number; value: string }[];
}

/** A list with a bar behind each entry. */
function Bars({ name, title, note, bars }: BarsProps): JSX.Element | null {
  if (!bars.length) return null;
  return (
    <section class="panel" aria-labelledby={name}>
      <h3 id={name}>{title}</h3>
      <p class="note">{note}</p>
      <ol class="plain bars">
        {bars.map(({ content, share, value }, i) => (
          <li key={i} style={{ "--share": String(share) }}>
            {content}
            <span class="value">{value}</span>
          </li>
        ))}
      </ol>
    </section>
  );
}
