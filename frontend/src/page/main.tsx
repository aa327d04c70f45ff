/** Reads the page's data and draws it. */
import { render } from "preact";
import type { Page } from "../data";
import "../parts/parts.css";
import { App } from "./app";
import { Model } from "./model";
import "./page.css";

function start(): void {
  const root = document.getElementById("polyhead-page");
  const data = document.getElementById("polyhead-data");
  if (!root || !data) throw new Error("the page must hold #polyhead-page and #polyhead-data");
  const page = JSON.parse(data.textContent ?? "") as Page;
  root.replaceChildren();
  render(<App model={new Model(page)} />, root);
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
