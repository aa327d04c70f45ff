/**
 * Entry point of the pages of a plan and of a training run: shows one view in one language of what report/plan_page.py
 * or report/training_page.py wrote, and draws the charts.
 */
import { render, type JSX } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";
import type { Text } from "../data";
import { Segments } from "../parts/controls";
import { Frame } from "../parts/frame";
import { createLocale, LocaleContext, type Language } from "../parts/language";
import "../parts/parts.css";
import { hrefOf, replaceQuery, useRoute, type Route } from "../parts/router";
import { strings } from "../parts/strings";
import { PlanFigure, type PlanChart } from "./chart";
import { PanelFigure, type PanelChart } from "./panels";
import "./plan.css";

type Variants = { name: Text | null; chart: PlanChart | PanelChart }[];

const data = document.getElementById("polyhead-data");
if (!data) throw new Error("the page must contain #polyhead-data");
const charts = JSON.parse(data.textContent ?? "") as Record<string, Variants>;
const bodies = [...document.querySelectorAll<HTMLElement>("[data-language]")];
const views = Object.keys(charts).concat("numbers");
let shown: string | undefined;

/** The chart of a question, with buttons that choose one of its variants. */
function Question({ variants, language }: { variants: Variants; language: Language }): JSX.Element | null {
  const [at, choose] = useState(0);
  const variant = variants[at];
  if (!variant) return null;
  const options = variants.map(({ name }, i) => [i, name?.[language] ?? ""] as const);
  const label = language === "zh" ? "阶段" : "Phase";
  return (
    <LocaleContext.Provider value={createLocale(language)}>
      {options.length > 1 ? <Segments label={label} options={options} value={at} onChange={choose} /> : null}
      {"panels" in variant.chart ? <PanelFigure chart={variant.chart} /> : <PlanFigure chart={variant.chart} />}
    </LocaleContext.Provider>
  );
}

function show(route: Route): void {
  const chosen = bodies.find((body) => body.dataset.language === route.query.lang) ?? bodies[0];
  const view = views.find((name) => name === route.path[0]) ?? views[0];
  for (const body of bodies) {
    body.hidden = body !== chosen;
    for (const section of body.querySelectorAll<HTMLElement>("[data-view]")) section.hidden = section.dataset.view !== view;
    for (const [i, link] of [...body.querySelectorAll(".views a")].entries()) {
      link.setAttribute("href", hrefOf([views[i] ?? ""], route.query));
      if (views[i] === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
  if (!chosen) return;
  const language: Language = chosen.dataset.language === "zh" ? "zh" : "en";
  const switches = chosen.querySelector(".switches");
  const onLanguage = (lang: Language) => replaceQuery(route, { lang });
  if (switches) {
    const frame = <Frame {...{ language, onLanguage, strings }}>{(content) => content}</Frame>;
    render(frame, switches);
  }
  for (const element of chosen.querySelectorAll<HTMLElement>("[data-charts]")) {
    render(<Question variants={charts[element.dataset.charts ?? ""] ?? []} language={language} />, element);
  }
  if (shown !== undefined && shown !== view) {
    chosen.querySelector<HTMLElement>(`[data-view="${view}"] h2`)?.focus({ preventScroll: true });
  }
  if (shown !== view) scrollTo(0, 0);
  shown = view;
}

function Page(): null {
  const route = useRoute();
  useLayoutEffect(() => show(route), [route.path[0], route.query.lang]);
  return null;
}

render(<Page />, document.createElement("div"));
