/** Light or dark colours: those of the system, or as chosen. */
import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";

export type Theme = "auto" | "light" | "dark";
const KEY = "polyhead-theme";
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function remembered(): Theme {
  try {
    const theme = localStorage.getItem(KEY);
    return theme === "light" || theme === "dark" ? theme : "auto";
  } catch {
    return "auto"; // a sandboxed frame has no storage
  }
}

function remember(theme: Theme): void {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // The choice is then not remembered.
  }
}

/** True in dark mode; canvases and charts choose their colours by it. */
export const DarkContext = createContext(false);
export const useDark = () => useContext(DarkContext);

export function useTheme(): { theme: Theme; dark: boolean; choose: (theme: Theme) => void } {
  const [theme, setTheme] = useState<Theme>(remembered);
  const [system, setSystem] = useState(systemDark.matches);
  useEffect(() => {
    const listener = (event: MediaQueryListEvent) => setSystem(event.matches);
    systemDark.addEventListener("change", listener);
    return () => systemDark.removeEventListener("change", listener);
  }, []);
  const dark = theme === "auto" ? system : theme === "dark";
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  return {
    theme,
    dark,
    choose: (chosen) => {
      remember(chosen);
      setTheme(chosen);
    },
  };
}
