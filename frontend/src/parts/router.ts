/** Routes in the fragment, `#/head/2/7?example=1`; also from a file and in the frame of a notebook. */
import { useEffect, useState } from "preact/hooks";

export interface Route {
  path: string[];
  query: Record<string, string>;
}

export type Query = Record<string, string | number | null | undefined>;

function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return {
    path: path.split("/").filter(Boolean).map(decoded),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decoded(segment: string): string {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment; // a hand-written link may contain a lone %
  }
}

export function hrefOf(path: readonly (string | number)[], query: Query = {}): string {
  const kept = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.map((segment) => encodeURIComponent(String(segment))).join("/")}${search ? `?${search}` : ""}`;
}

const listeners = new Set<() => void>();
let current = location.hash;
let address = current; // `location.hash` when `current` was last updated

/** Navigates to a view; with `replace`, without an entry in the history. */
export function go(href: string, replace = false): void {
  current = href;
  try {
    if (replace) history.replaceState(null, "", href);
    else location.hash = href.slice(1);
  } catch {
    // A frame without an origin of its own cannot change its address; the view changes anyway.
  }
  address = location.hash;
  for (const listener of listeners) listener();
}

addEventListener("hashchange", () => {
  current = address = location.hash;
  for (const listener of listeners) listener();
});

// In a `srcdoc` frame `#/…` is relative to the surrounding page, so links are handled here.
document.addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest("a[href^='#/']") : null;
  const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
  if (!link || !plain) return;
  event.preventDefault();
  go(link.getAttribute("href") ?? "#/");
});

/** The route of the current address, even before `hashchange` is dispatched. */
export function currentRoute(): Route {
  if (location.hash !== address) current = address = location.hash;
  return parseRoute(current);
}

export function useRoute(): Route {
  const [hash, setHash] = useState(current);
  useEffect(() => {
    const listener = () => setHash(current);
    listeners.add(listener);
    listener();
    return () => void listeners.delete(listener);
  }, []);
  return parseRoute(hash);
}

/** The link to a view with some of its query changed. */
export function withQuery(route: Route, query: Query): string {
  return hrefOf(route.path, { ...route.query, ...query });
}

/** Changes some of the query of a view, without an entry in the history. */
export function replaceQuery(route: Route, query: Query): void {
  go(withQuery(route, query), true);
}
