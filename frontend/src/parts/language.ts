/** Interface strings and numbers in the language of the reader. */
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { NumberFormat, Text } from "../data";
import { strings } from "./strings";

export type Language = "en" | "zh";
export type StringName = keyof typeof strings;

export interface Locale<Name extends string = StringName> {
  language: Language;
  /** An interface string, with `{name}` replaced by its value. */
  t: (name: Name, values?: Record<string, string | number>) => string;
  /** A text that came with the data. */
  text: (text: Text) => string;
  number: (value: number | null | undefined, format?: NumberFormat) => string;
  /** The same in at most five letters, for a cell. */
  short: (value: number | null | undefined, format?: NumberFormat) => string;
  count: (value: number) => string;
  list: (items: string[]) => string;
}

export function createLocale(language: Language, table: Record<string, Text> = strings): Locale<string> {
  const locale = language === "zh" ? "zh-CN" : "en";
  const whole = new Intl.NumberFormat(locale);
  const significant = new Intl.NumberFormat(locale, { maximumSignificantDigits: 3 });
  const oneDecimal = new Intl.NumberFormat(locale, { maximumFractionDigits: 1 });
  const percent = new Intl.NumberFormat(locale, { style: "percent", maximumFractionDigits: 0 });
  const finePercent = new Intl.NumberFormat(locale, { style: "percent", maximumSignificantDigits: 2 });
  const scientific = new Intl.NumberFormat(locale, { notation: "scientific", maximumFractionDigits: 1 });
  const scientificShort = new Intl.NumberFormat(locale, { notation: "scientific", maximumFractionDigits: 0 });
  const conjunction = new Intl.ListFormat(locale, { type: "conjunction" });
  const twoDigits = new Intl.NumberFormat(locale, {
    maximumSignificantDigits: 2,
    maximumFractionDigits: 3,
    roundingPriority: "lessPrecision",
    notation: "compact",
  });
  const number: Locale["number"] = (value, format = "number") => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (format === "share") return (Math.abs(value) < 0.1 ? finePercent : percent).format(value);
    if (format === "tokens") return Math.abs(value) < 10 ? significant.format(value) : oneDecimal.format(value);
    return value !== 0 && Math.abs(value) < 1e-4 ? scientific.format(value) : significant.format(value);
  };
  return {
    language,
    t: (name, values = {}) =>
      (table[name]?.[language] ?? name).replace(/\{(\w+)\}( ?)/g, (_, key: string, space: string) => {
        const value = String(values[key] ?? `{${key}}`);
        return value.endsWith("）") ? value : value + space; // a full-width bracket includes its space
      }),
    text: (text) => text[language],
    number,
    short: (value, format = "number") => {
      if (typeof value !== "number" || !Number.isFinite(value) || format === "share") return number(value, format);
      return value !== 0 && Math.abs(value) < 0.001 ? scientificShort.format(value) : twoDigits.format(value);
    },
    count: (value) => whole.format(value),
    list: (items) => conjunction.format(items),
  };
}

export const LocaleContext = createContext<Locale>(createLocale("en"));
export const useLocale = () => useContext(LocaleContext);
