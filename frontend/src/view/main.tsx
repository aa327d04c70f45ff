/** Entry point of the viewer. */
import { render } from "preact";
import "../parts/parts.css";
import { App } from "./app";
import "./view.css";

const root = document.getElementById("polyhead-view");
if (!root) throw new Error("the page must contain #polyhead-view");
render(<App language={root.dataset.lang === "zh" ? "zh" : "en"} />, root);
