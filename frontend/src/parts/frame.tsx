/** Frame of the page and of the viewer: language, colours, header and navigation. */
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import type { Text } from "../data";
import { createLocale, LocaleContext, useLocale, type Language } from "./language";
import "./frame.css";
import { DarkContext, useTheme, type Theme } from "./theme";
import { Line } from "./tokens";

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

interface ShellProps {
  title: string;
  facts: ComponentChildren;
  switches: ComponentChildren;
  /** Content between the header and the navigation. */
  tools?: ComponentChildren;
  links: { href: string; label: string; current: boolean }[];
  /** Identifies the view; when it changes, the heading of the new view receives the focus. */
  view: string;
  /** Scrolls to the top of a new view. */
  scrolls?: boolean;
  footer: string;
  children: ComponentChildren;
}

/** Header, navigation and footer around a view. */
export function Shell(props: ShellProps): JSX.Element {
  const { t } = useLocale();
  const main = useRef<HTMLElement>(null);
  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) {
      if (props.scrolls) scrollTo(0, 0);
      main.current?.querySelector<HTMLElement>("h2")?.focus({ preventScroll: Boolean(props.scrolls) });
    }
    isFirst.current = false;
  }, [props.view]);
  const skip = (event: Event) => {
    event.preventDefault();
    main.current?.focus();
  };
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        {t("skip")}
      </a>
      <header class="page-head">
        <div class="title">
          <h1>
            <Line text={props.title} />
          </h1>
          <p class="facts">{props.facts}</p>
        </div>
        <div class="switches">{props.switches}</div>
      </header>
      {props.tools}
      <nav class="views" aria-label={t("views")}>
        {props.links.map(({ href, label, current }) => (
          <a href={href} aria-current={current ? "page" : undefined}>
            {label}
          </a>
        ))}
      </nav>
      <main id="main" tabIndex={-1} ref={main}>
        {props.children}
      </main>
      <footer>{props.footer}</footer>
    </>
  );
}
