/** Entry point of a plan's page: renders the charts into the elements that report/plan_page.py wrote. */
import { render } from "preact";
import "../parts/parts.css";
import { PlanFigure, type PlanChart } from "./chart";
import "./plan.css";

const data = document.getElementById("polyhead-data");
if (!data) throw new Error("the page must contain #polyhead-data");
const charts = JSON.parse(data.textContent ?? "") as Record<string, PlanChart[]>;
for (const element of document.querySelectorAll<HTMLElement>("[data-charts]")) {
  const section = charts[element.dataset.charts ?? ""] ?? [];
  const figures = section.map((chart) => <PlanFigure key={chart.title} chart={chart} />);
  render(figures, element);
}
