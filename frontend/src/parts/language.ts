/** Words and numbers in the reader's language. */
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { NumberFormat, Text } from "../data";
import { strings } from "./strings";

export type Language = "en" | "zh";
export type StringName = keyof typeof strings;

export interface Words {
  language: Language;
  /** A string of the interface, with `{name}` filled in. */
  say: (name: StringName, values?: Record<string, string | number>) => string;
  /** A text that came with the data. */
  text: (text: Text) => string;
  number: (value: number | null | undefined, format?: NumberFormat) => string;
  count: (value: number) => string;
  list: (items: string[]) => string;
}

export function wordsOf(language: Language): Words {
  const locale = language === "zh" ? "zh-CN" : "en";
  const whole = new Intl.NumberFormat(locale);
  const significant = new Intl.NumberFormat(locale, { maximumSignificantDigits: 3 });
  const oneDecimal = new Intl.NumberFormat(locale, { maximumFractionDigits: 1 });
  const percent = new Intl.NumberFormat(locale, { style: "percent", maximumFractionDigits: 0 });
  const finePercent = new Intl.NumberFormat(locale, { style: "percent", maximumFractionDigits: 1 });
  const small = new Intl.NumberFormat(locale, { notation: "scientific", maximumFractionDigits: 1 });
  const together = new Intl.ListFormat(locale, { type: "conjunction" });

  function plain(value: number): string {
    return value !== 0 && Math.abs(value) < 1e-4 ? small.format(value) : significant.format(value);
  }

  const words: Words = {
    language,
    say: (name, values = {}) =>
      strings[name][language].replace(/\{(\w+)\}/g, (whole, key: string) => String(values[key] ?? whole)),
    text: (text) => text[language],
    number: (value, format = "number") => {
      if (value === null || value === undefined || !Number.isFinite(value)) return "–";
      if (format === "share") return (Math.abs(value) < 0.1 ? finePercent : percent).format(value);
      if (format === "tokens") return Math.abs(value) < 10 ? significant.format(value) : oneDecimal.format(value);
      return plain(value);
    },
    count: (value) => whole.format(value),
    list: (items) => together.format(items),
  };
  return words;
}

export const WordsContext = createContext<Words>(wordsOf("en"));
export const useWords = () => useContext(WordsContext);
