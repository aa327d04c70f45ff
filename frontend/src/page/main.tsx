/** Entry point of the page. */
import { render } from "preact";
import type { Page } from "../data";
import "../parts/parts.css";
import { App } from "./app";
import { Model } from "./model";
import "./page.css";

const root = document.getElementById("polyhead-page");
const data = document.getElementById("polyhead-data");
if (!root || !data) throw new Error("the page must contain #polyhead-page and #polyhead-data");
render(<App model={new Model(JSON.parse(data.textContent ?? "") as Page)} />, root);
