/** Where maps look: one place for all that stand side by side, and in the address, so that a link opens it again. */
import { useEffect, useState } from "preact/hooks";
import { changed, currentRoute, go, type Route } from "../../parts/router";
import type { Pool } from "../types";

/** The tokens in the upper left corner, in parts of a token too, and how many lie across the window. */
export interface Position {
  query: number;
  key: number;
  across: number;
}

const REST = 300; // milliseconds without a movement, after which the address is written
const LINK = /^(-?\d+(?:\.\d+)?)_(-?\d+(?:\.\d+)?)_(\d+(?:\.\d+)?)$/;

/** What a link says, `1200.5_300_64`; null for the whole, and for what makes no sense. */
export function positionIn(link: string | null): Position | null {
  const [query, key, across] = (LINK.exec(link ?? "") ?? []).slice(1).map(Number);
  return query !== undefined && key !== undefined && across ? { query, key, across } : null;
}

export function linkOf(position: Position | null): string | null {
  if (!position) return null;
  const { query, key, across } = position;
  // A hundredth of a token is less than half a pixel at the closest.
  return [query, key, across].map((tokens) => String(Number(tokens.toFixed(2)))).join("_");
}

type Follow = () => void;

export class SharedPosition {
  position: Position | null;
  private followers = new Set<Follow>();
  private timer = 0;

  /** Begins where the address of a view says. */
  constructor(
    private view: string | undefined,
    private link: string | null,
  ) {
    this.position = positionIn(link);
  }

  subscribe(follow: Follow): () => void {
    this.followers.add(follow);
    return () => void this.followers.delete(follow);
  }

  /** One map was moved: the others follow at once, the address when it has come to rest. */
  move(position: Position | null, mover: Follow): void {
    this.position = position;
    for (const follow of this.followers) if (follow !== mover) follow();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), REST);
  }

  /** The address was changed from outside: back, forward, or another link. */
  take(link: string | null): void {
    if (link === this.link) return;
    this.link = link;
    this.position = positionIn(link);
    clearTimeout(this.timer);
    for (const follow of this.followers) follow();
  }

  stop(): void {
    clearTimeout(this.timer);
  }

  private write(): void {
    const link = linkOf(this.position);
    const route = currentRoute();
    // Somebody has left for another view or another place meanwhile, and must not be brought back.
    const isLeft = route.path[0] !== this.view || (route.query.map ?? null) !== this.link;
    if (isLeft || link === this.link) return;
    this.link = link;
    go(changed(route, { map: link }));
  }
}

/** How the maps of a view are looked at. */
export interface Outlook {
  shared: SharedPosition;
  pool: Pool;
  choosePool: (pool: Pool) => void;
}

export function useOutlook(route: Route): Outlook {
  const link = route.query.map ?? null;
  const [shared] = useState(() => new SharedPosition(route.path[0], link));
  useEffect(() => shared.take(link), [link]);
  useEffect(() => () => shared.stop(), []);
  return {
    shared,
    pool: route.query.pool === "max" ? "max" : "sum",
    choosePool: (pool) => go(changed(currentRoute(), { pool: pool === "sum" ? null : pool })),
  };
}
