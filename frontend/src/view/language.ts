/** Strings of the viewer, added to those it shares with the page. */
import { useLocale, type Locale, type StringName } from "../parts/language";
import { strings } from "../parts/strings";
import { viewStrings } from "./strings";

type ViewStringName = keyof typeof viewStrings;
export type ViewLocale = Locale<StringName | ViewStringName>;

export const allStrings = { ...strings, ...viewStrings };

export const useViewLocale = () => useLocale() as ViewLocale;

/** The string for a kind of error of the server. */
export function errorStringName(kind: string): ViewStringName {
  const name = `error_${kind}`;
  return Object.hasOwn(viewStrings, name) ? (name as ViewStringName) : "error_failed";
}
