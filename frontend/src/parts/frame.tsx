/** What stands around every view, of the page and of the viewer: language, colours, and a way past both. */
import type { ComponentChildren, JSX, RefObject } from "preact";
import { useLayoutEffect, useMemo } from "preact/hooks";
import { useWords, WordsContext, wordsOf, type Language } from "./language";
import { DarkContext, useTheme, type Theme } from "./theme";

const THEMES: Theme[] = ["auto", "light", "dark"];
const LANGUAGES: [Language, string][] = [
  ["en", "English"],
  ["zh", "中文"],
];

interface FrameProps {
  language: Language;
  onLanguage: (language: Language) => void;
  /** Draws everything, given the switches that it puts where it likes. */
  children: (switches: JSX.Element) => ComponentChildren;
}

/** Everything inside speaks the language and has the colours that the reader chose. */
export function Frame({ language, onLanguage, children }: FrameProps): JSX.Element {
  const words = useMemo(() => wordsOf(language), [language]);
  const { theme, dark, choose } = useTheme();
  useLayoutEffect(() => {
    document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  }, [language]);
  const switches = (
    <>
      <Switch label={words.say("language")} value={language} onChange={(value) => onLanguage(value as Language)}>
        {LANGUAGES.map(([value, name]) => (
          <option value={value}>{name}</option>
        ))}
      </Switch>
      <Switch label={words.say("theme")} value={theme} onChange={(value) => choose(value as Theme)}>
        {THEMES.map((value) => (
          <option value={value}>{words.say(`theme_${value}`)}</option>
        ))}
      </Switch>
    </>
  );
  return (
    <WordsContext.Provider value={words}>
      <DarkContext.Provider value={dark}>{children(switches)}</DarkContext.Provider>
    </WordsContext.Provider>
  );
}

function Switch(props: {
  label: string;
  value: string;
  onChange: (value: string) => void;
  children: ComponentChildren;
}): JSX.Element {
  return (
    <select
      aria-label={props.label}
      value={props.value}
      onChange={(event) => props.onChange(event.currentTarget.value)}
    >
      {props.children}
    </select>
  );
}

/** The first thing that a keyboard reaches. */
export function SkipLink({ main }: { main: RefObject<HTMLElement | null> }): JSX.Element {
  const { say } = useWords();
  return (
    <a
      class="skip"
      href="#main"
      onClick={(event) => {
        event.preventDefault();
        main.current?.focus();
      }}
    >
      {say("skip")}
    </a>
  );
}
