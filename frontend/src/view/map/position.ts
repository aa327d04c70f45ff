/** Visible part of the maps, shared by maps side by side and stored in the link. */
import { useEffect, useState } from "preact/hooks";
import { withQuery, currentRoute, go, type Route } from "../../parts/router";
import type { Pool } from "../types";

/** The upper left corner in (fractional) tokens, and the number of tokens across the window. */
interface Position {
  query: number;
  key: number;
  across: number;
}

const REST = 300; // milliseconds without movement after which the link is updated
const LINK = /^(-?\d+(?:\.\d+)?)_(-?\d+(?:\.\d+)?)_(\d+(?:\.\d+)?)$/;

/** The position of a link, `1200.5_300_64`; null for the whole matrix, and for an invalid link. */
function positionIn(link: string | null): Position | null {
  const [query, key, across] = (LINK.exec(link ?? "") ?? []).slice(1).map(Number);
  return query !== undefined && key !== undefined && across ? { query, key, across } : null;
}

function linkOf(position: Position | null): string | null {
  if (!position) return null;
  const { query, key, across } = position;
  // A hundredth of a token is less than half a pixel at the closest zoom.
  return [query, key, across].map((tokens) => String(Number(tokens.toFixed(2)))).join("_");
}

type Listener = () => void;

export class SharedPosition {
  position: Position | null;
  private listeners = new Set<Listener>();
  private timer = 0;

  /** `view` is the first segment of the route, `link` the position in it. */
  constructor(
    private view: string | undefined,
    private link: string | null,
  ) {
    this.position = positionIn(link);
  }

  subscribe(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }

  /** Moves the other maps at once, and updates the link after the last movement. */
  move(position: Position | null, mover: Listener): void {
    this.position = position;
    for (const listener of this.listeners) if (listener !== mover) listener();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), REST);
  }

  /** Follows a navigation: back, forward, or another link. */
  navigate(link: string | null): void {
    if (link === this.link) return;
    this.link = link;
    this.position = positionIn(link);
    clearTimeout(this.timer);
    for (const listener of this.listeners) listener();
  }

  stop(): void {
    clearTimeout(this.timer);
  }

  private write(): void {
    const link = linkOf(this.position);
    const route = currentRoute();
    // A navigation to another view or position must not be undone.
    const hasNavigated = route.path[0] !== this.view || (route.query.map ?? null) !== this.link;
    if (hasNavigated || link === this.link) return;
    this.link = link;
    go(withQuery(route, { map: link }));
  }
}

/** Position and pooling of the maps of a view. */
export interface MapView {
  shared: SharedPosition;
  pool: Pool;
  choosePool: (pool: Pool) => void;
}

export function useMapView(route: Route): MapView {
  const link = route.query.map ?? null;
  const [shared] = useState(() => new SharedPosition(route.path[0], link));
  useEffect(() => shared.navigate(link), [link]);
  useEffect(() => () => shared.stop(), []);
  return {
    shared,
    pool: route.query.pool === "max" ? "max" : "sum",
    choosePool: (pool) => go(withQuery(currentRoute(), { pool: pool === "sum" ? null : pool })),
  };
}
