/** Draws the charts of a plan's page into the places that Python left for them. */
import { render } from "preact";
import "../parts/parts.css";
import { PlanFigure, type PlanChart } from "./chart";
import "./plan.css";

function start(): void {
  const data = document.getElementById("polyhead-data");
  if (!data) throw new Error("the page must hold #polyhead-data");
  const charts = JSON.parse(data.textContent ?? "") as Record<string, PlanChart[]>;
  for (const place of document.querySelectorAll<HTMLElement>("[data-charts]")) {
    const section = charts[place.dataset.charts ?? ""] ?? [];
    render(
      section.map((chart) => <PlanFigure key={chart.title} chart={chart} />),
      place,
    );
  }
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
