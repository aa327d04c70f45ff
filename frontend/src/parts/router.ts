/** Every view is a link: `#/head/2/7?example=1`. Works from a file, and in a notebook's frame. */
import { useEffect, useState } from "preact/hooks";

export interface Route {
  path: string[];
  query: Record<string, string>;
}

export type Query = Record<string, string | number | null | undefined>;

export function parseRoute(hash: string): Route {
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
    return segment; // a hand-written link may hold a lone %
  }
}

export function hrefOf(path: readonly (string | number)[], query: Query = {}): string {
  const kept = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const asked = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${path.map((segment) => encodeURIComponent(String(segment))).join("/")}${asked ? `?${asked}` : ""}`;
}

const listeners = new Set<() => void>();
let current = location.hash;
let address = current; // `location.hash` when `current` was last brought up to date

/** Goes to a view. With `replace`, the browser's history gains no entry. */
export function go(href: string, replace = false): void {
  current = href;
  try {
    if (replace) history.replaceState(null, "", href);
    else location.hash = href.slice(1);
  } catch {
    // A frame without an origin of its own may not touch its address: the view changes all the same.
  }
  address = location.hash;
  for (const listener of listeners) listener();
}

addEventListener("hashchange", () => {
  current = address = location.hash;
  for (const listener of listeners) listener();
});

// In a frame made by `srcdoc`, `#/…` is taken relative to the page around it, so links are followed here.
document.addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest("a[href^='#/']") : null;
  const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
  if (!link || !plain) return;
  event.preventDefault();
  go(link.getAttribute("href") ?? "#/");
});

/** What the address says now, even if `hashchange` has yet to be dispatched. */
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

/** The same view with some of its query changed. */
export function changed(route: Route, query: Query): string {
  return hrefOf(route.path, { ...route.query, ...query });
}
