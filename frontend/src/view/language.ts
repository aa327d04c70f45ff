/** The viewer's own words, beside those it shares with the page. */
import { useWords, type StringName, type Words } from "../parts/language";
import { viewStrings } from "./strings";

type ViewStringName = keyof typeof viewStrings;
type Values = Record<string, string | number>;

export interface ViewWords extends Omit<Words, "say"> {
  say: (name: ViewStringName | StringName, values?: Values) => string;
}

function isOfTheViewer(name: string): name is ViewStringName {
  return Object.hasOwn(viewStrings, name);
}

export function useView(): ViewWords {
  const words = useWords();
  const say: ViewWords["say"] = (name, values = {}) =>
    isOfTheViewer(name)
      ? viewStrings[name][words.language].replace(/\{(\w+)\}/g, (whole, key: string) => String(values[key] ?? whole))
      : words.say(name, values);
  return { ...words, say };
}

/** The strings of what can go wrong, for kinds that have words of their own. */
export function troubleName(kind: string): ViewStringName {
  const name = `trouble_${kind}`;
  return isOfTheViewer(name) ? name : "trouble_failed";
}
