/** Frame of the page and of the viewer: language and colour switches, and a link that skips them. */
import type { ComponentChildren, JSX, RefObject } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { Text } from "../data";
import { createLocale, LocaleContext, useLocale, type Language } from "./language";
import "./frame.css";
import { DarkContext, useTheme, type Theme } from "./theme";

const THEMES: Theme[] = ["auto", "light", "dark"];
const LANGUAGES: [Language, string][] = [
  ["en", "English"],
  ["zh", "中文"],
];

interface FrameProps {
  language: Language;
  onLanguage: (language: Language) => void;
  strings: Record<string, Text>;
  /** Renders the content around the switches. */
  children: (switches: JSX.Element) => ComponentChildren;
}

/** Provides the chosen language and colours to everything inside. */
export function Frame({ language, onLanguage, strings, children }: FrameProps): JSX.Element {
  const locale = useMemo(() => createLocale(language, strings), [language]);
  const { theme, dark, choose } = useTheme();
  useLayoutEffect(() => {
    document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  }, [language]);
  const themes = THEMES.map((value): [Theme, string] => [value, locale.t(`theme_${value}`)]);
  const switches = (
    <>
      <Switch label={locale.t("language")} value={language} options={LANGUAGES} onChange={onLanguage} />
      <Switch label={locale.t("theme")} value={theme} options={themes} onChange={choose} />
    </>
  );
  return (
    <LocaleContext.Provider value={locale}>
      <DarkContext.Provider value={dark}>{children(switches)}</DarkContext.Provider>
    </LocaleContext.Provider>
  );
}

interface SwitchProps<Value extends string> {
  label: string;
  value: Value;
  options: [Value, string][];
  onChange: (value: Value) => void;
}

function Switch<Value extends string>({ label, value, options, onChange }: SwitchProps<Value>): JSX.Element {
  return (
    <select aria-label={label} value={value} onChange={(event) => onChange(event.currentTarget.value as Value)}>
      {options.map(([option, name]) => (
        <option value={option}>{name}</option>
      ))}
    </select>
  );
}

/** Calls back when a view is replaced by another, not for the first one. */
export function useViewChange(view: string, onChange: () => void): void {
  const first = useRef(true);
  useEffect(() => {
    if (!first.current) onChange();
    first.current = false;
  }, [view]);
}

/** First stop of the keyboard. */
export function SkipLink({ main }: { main: RefObject<HTMLElement | null> }): JSX.Element {
  const { t } = useLocale();
  const skip = (event: Event) => {
    event.preventDefault();
    main.current?.focus();
  };
  return (
    <a class="skip" href="#main" onClick={skip}>
      {t("skip")}
    </a>
  );
}
