/** Asks the server what there is, and draws it. */
import { render } from "preact";
import "../parts/parts.css";
import type { Language } from "../parts/language";
import { App } from "./app";
import "./view.css";

function start(): void {
  const root = document.getElementById("polyhead-view");
  if (!root) throw new Error("the page must hold #polyhead-view");
  const language: Language = root.dataset.lang === "zh" ? "zh" : "en";
  render(<App language={language} />, root);
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
