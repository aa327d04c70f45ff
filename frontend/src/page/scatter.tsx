/** Two columns of the table as a scatter plot, one point per head, which links to the head's card. */
import { axisX, axisY, dot, gridX, gridY } from "@observablehq/plot";
import type { JSX } from "preact";
import { useCallback, useMemo, useState } from "preact/hooks";
import type { Column, Head } from "../data";
import { Chart, drawPlot, FILE_WIDTH, widthOf, type Build } from "../parts/chart";
import { roleColour, scaleOf } from "../parts/colour";
import { Figure } from "../parts/figure";
import { useLocale } from "../parts/language";
import { RampLegend } from "../parts/legend";
import { go } from "../parts/router";
import { addRamp, createElement, createSvg, RAMP_HEIGHT, type Ramp } from "../parts/svg";
import { useDark } from "../parts/theme";
import { axisLabel } from "./column-name";
import { headsCsv } from "./heads-csv";
import { headHref, idOf, isNumber, keyOf, useModel, withUnit } from "./model";

export const COLOURINGS = ["layer", "role", "none"] as const;
export type Colouring = (typeof COLOURINGS)[number];

// One symbol per stack, as far as they go.
const SYMBOLS = ["circle", "square", "triangle", "diamond", "star"] as const;
type SymbolName = (typeof SYMBOLS)[number];
const GLYPHS: Record<SymbolName, string> = { circle: "●", square: "■", triangle: "▲", diamond: "◆", star: "★" };

const LIGHTEST = 0.3; // start of the ramp of layers: a lighter point is invisible on the background
const NEAR = 20; // pixels from which the pointer finds a point
const ROW = 20; // height of a row of the legend in a file
const HEIGHT = { ratio: 0.62, least: 300, most: 560 };

interface Point {
  head: Head;
  x: number;
  y: number;
  colour: string;
  symbol: SymbolName;
  name: string;
  /** Name and numbers in words. */
  described: string;
}

/** An entry of the legend. */
interface Key {
  label: string;
  glyph: string;
  colour: string;
}

interface ScatterProps {
  x: Column;
  y: Column;
  colouring: Colouring;
}

export function Scatter({ x, y, colouring }: ScatterProps): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t, text, count } = locale;
  const dark = useDark();
  const { page } = model;
  const [shown, show] = useState<Point | null>(null);

  const { points, keys, layers } = useMemo(() => {
    const noRoleColour = dark ? "#5d6270" : "#b4b8bd";
    const last = Math.max(1, ...page.sites.map((site) => site.layer));
    const layerScale = scaleOf(0, last, dark, 1, LIGHTEST);
    const colourOf = (head: Head) => {
      if (colouring === "none") return "var(--first)";
      if (colouring === "layer") return layerScale.of(page.sites[head.site]?.layer);
      const role = model.rolesOf(head)[0];
      return role ? roleColour(role.role, dark) : noRoleColour;
    };
    const symbolOf = (head: Head) => {
      const stack = page.stacks.findIndex((one) => one.sites.includes(head.site));
      return SYMBOLS[Math.max(0, stack) % SYMBOLS.length] as SymbolName;
    };
    const drawn = page.heads.flatMap((head): Point[] => {
      const [atX, atY] = [model.value(head, x.name), model.value(head, y.name)];
      if (!isNumber(atX) || !isNumber(atY)) return [];
      const numbers = [x, y].map(
        (column) => `${text(column.label)} ${withUnit(model.value(head, column.name), column.format, locale)}`,
      );
      const name = model.fullName(idOf(head), locale);
      const described = t("pointDescribed", { head: name, numbers: numbers.join(", ") });
      return [{ head, x: atX, y: atY, colour: colourOf(head), symbol: symbolOf(head), name, described }];
    });
    // Heads with a role are drawn over the others.
    const roleCount = ({ head }: Point) => model.rolesOf(head).length;
    if (colouring === "role") drawn.sort((one, other) => roleCount(one) - roleCount(other));
    const roles = page.roles.flatMap((role): Key[] =>
      drawn.some(({ head }) => model.rolesOf(head)[0]?.role === role.name)
        ? [{ label: text(role.label), glyph: "●", colour: roleColour(role.name, dark) }]
        : [],
    );
    const noRole = drawn.some(({ head }) => !model.rolesOf(head).length)
      ? [{ label: t("noRole"), glyph: "●", colour: noRoleColour }]
      : [];
    const stacks = page.stacks.map((stack, i): Key => {
      const symbol = SYMBOLS[i % SYMBOLS.length] as SymbolName;
      return { label: text(stack.label), glyph: GLYPHS[symbol], colour: "var(--muted)" };
    });
    return {
      points: drawn,
      keys: [...(colouring === "role" ? [...roles, ...noRole] : []), ...(stacks.length > 1 ? stacks : [])],
      layers: colouring === "layer" ? layerScale : null,
    };
  }, [model, locale, dark, x, y, colouring]);

  const build = useMemo<Build>(
    () => (width) => {
      const labels = [x, y].map((column) => axisLabel(column, locale)) as [string, string];
      const format = (column: Column) => (value: number) => locale.number(value, column.format);
      const longest = Math.max(...model.values(y.name).map((value) => widthOf(format(y)(value))), 20);
      return {
        width,
        height: Math.round(Math.min(HEIGHT.most, Math.max(HEIGHT.least, width * HEIGHT.ratio))),
        marginLeft: Math.min(70, longest + 20),
        marginRight: 20,
        marginTop: 30,
        marginBottom: 44,
        inset: 10,
        x: { nice: true },
        y: { nice: true },
        color: { type: "identity" },
        symbol: { type: "identity" },
        marks: [
          gridX({ stroke: "var(--line)", strokeOpacity: 1, ticks: Math.max(3, Math.floor(width / 110)) }),
          gridY({ stroke: "var(--line)", strokeOpacity: 1, ticks: 6 }),
          axisX({
            label: labels[0],
            labelAnchor: "center",
            labelArrow: "none",
            ticks: Math.max(3, Math.floor(width / 110)),
            tickFormat: format(x),
            fontSize: 12,
          }),
          axisY({ label: labels[1], labelArrow: "none", ticks: 6, tickFormat: format(y), fontSize: 12 }),
          dot(points, {
            className: "points",
            x: "x",
            y: "y",
            r: 4.5,
            fill: "colour",
            symbol: "symbol",
            stroke: "var(--ink)",
            strokeOpacity: 0.55,
            strokeWidth: 0.75,
          }),
        ],
      };
    },
    [points, x, y, locale],
  );
  const decorate = useCallback((svg: SVGSVGElement) => linkPoints(svg, points, show), [points]);
  const label = t("scatterDescribed", { x: text(x.label), y: text(y.label), heads: count(points.length) });
  const omitted = page.heads.length - points.length;
  // The middle of an odd number of steps is no layer.
  const formatLayer = (value: number) => (Number.isInteger(value) ? t("layerName", { layer: value }) : "");
  const layerRamp = layers && { scale: layers, format: formatLayer };
  return (
    <Figure
      class="scatter-figure"
      title={t("onePoint")}
      note={omitted ? t("scatterOmitted", { count: count(omitted) }) : ""}
      name={`scatter-${x.name}-${y.name}`}
      fileTitle={`${t("onePoint")}: ${t("scatterTitle", { x: text(x.label), y: text(y.label) })}. ${page.facts.model}`}
      draw={() => withLegend(drawPlot(build(FILE_WIDTH), label), keys, layerRamp)}
      csv={() => headsCsv(model, page.heads, [...new Set([x.name, y.name])])}
    >
      <div class="scatter-legend">
        {layerRamp ? <RampLegend {...layerRamp} /> : null}
        {keys.length ? (
          <ul class="plain keys">
            {keys.map(({ label: name, glyph, colour }) => (
              <li>
                <span class="key-glyph" style={{ color: colour }} aria-hidden="true">
                  {glyph}
                </span>{" "}
                {name}
              </li>
            ))}
          </ul>
        ) : null}
      </div>
      <Chart build={build} label={label} decorate={decorate} />
      <p class="readout" aria-hidden="true">
        {shown?.described ?? t("scatterHint")}
      </p>
    </Figure>
  );
}

/** Makes each point a link that is named on hover and focus; arrow keys move along either axis. */
function linkPoints(svg: SVGSVGElement, points: Point[], show: (point: Point | null) => void): void {
  svg.setAttribute("role", "group");
  const links = new Map<Point, SVGElement>();
  for (const mark of svg.querySelectorAll<SVGElement & { __data__?: number }>(".points > *")) {
    const point = points[mark.__data__ ?? -1];
    if (!point) continue;
    const id = idOf(point.head);
    const link = createElement("a", {
      href: headHref(id),
      "aria-label": point.described,
      "data-key": keyOf(id),
      tabindex: -1,
    });
    mark.replaceWith(link);
    link.append(mark);
    links.set(point, link);
  }
  // In front of all points; a point that is moved to the front would lose the focus.
  const ring = createElement("circle", { class: "point-ring", r: 8, visibility: "hidden" });
  const name = createElement("text", { class: "point-name", "font-size": 13, visibility: "hidden" });
  svg.append(ring, name);
  let chosen: Point | null = null;
  const choose = (point: Point | null) => {
    if (point === chosen) return;
    if (chosen) links.get(chosen)?.classList.remove("chosen");
    chosen = point;
    show(point);
    const link = point && (links.get(point) as SVGGraphicsElement | undefined);
    for (const part of [ring, name]) part.setAttribute("visibility", link ? "visible" : "hidden");
    if (!point || !link) return;
    link.classList.add("chosen");
    const box = link.getBBox();
    ring.setAttribute("cx", String(box.x + box.width / 2));
    ring.setAttribute("cy", String(box.y + box.height / 2));
    const isRight = box.x > svg.viewBox.baseVal.width / 2;
    name.setAttribute("x", String(isRight ? box.x - 8 : box.x + box.width + 8));
    name.setAttribute("y", String(box.y - 4));
    name.setAttribute("text-anchor", isRight ? "end" : "start");
    name.textContent = point.name;
  };
  const nearest = (event: MouseEvent): Point | null => {
    let best: [distance: number, point: Point | null] = [NEAR, null];
    for (const [point, link] of links) {
      const box = link.getBoundingClientRect();
      const distance = Math.hypot(event.clientX - box.x - box.width / 2, event.clientY - box.y - box.height / 2);
      if (distance < best[0]) best = [distance, point];
    }
    return best[1];
  };
  const orders = { x: byValue(links, "x"), y: byValue(links, "y") };
  const first = orders.x[0];
  if (first) links.get(first)?.setAttribute("tabindex", "0");
  const focus = (point: Point | undefined) => {
    if (!point) return;
    for (const link of links.values()) link.setAttribute("tabindex", "-1");
    const link = links.get(point);
    link?.setAttribute("tabindex", "0");
    link?.focus();
  };
  const pointOf = (event: Event) => [...links].find(([, link]) => link.contains(event.target as Node))?.[0] ?? null;
  svg.addEventListener("focusin", (event) => choose(pointOf(event)));
  svg.addEventListener("focusout", () => choose(null));
  svg.addEventListener("pointermove", (event) => choose(nearest(event)));
  svg.addEventListener("pointerleave", () => choose(null));
  svg.addEventListener("click", (event) => {
    const point = pointOf(event) ? null : nearest(event); // a link is followed by the router
    if (point) go(headHref(idOf(point.head)));
  });
  svg.addEventListener("keydown", (event) => {
    const point = pointOf(event);
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!point || !step) return;
    event.preventDefault();
    const order = orders[event.key === "ArrowUp" || event.key === "ArrowDown" ? "y" : "x"];
    focus(order[order.indexOf(point) + step]);
  });
}

function byValue(links: Map<Point, SVGElement>, axis: "x" | "y"): Point[] {
  return [...links.keys()].sort((one, other) => one[axis] - other[axis]);
}

/** The plot above its legend, for a file. */
function withLegend(
  plot: SVGSVGElement,
  keys: Key[],
  ramp: Ramp | null,
): SVGSVGElement {
  const [width, height] = ["width", "height"].map((name) => Number(plot.getAttribute(name))) as [number, number];
  const placed: (Key & { x: number; row: number })[] = [];
  let [x, row] = [8, 0];
  for (const key of keys) {
    const wide = widthOf(key.label) + 34;
    if (x + wide > width && x > 8) [x, row] = [8, row + 1];
    placed.push({ ...key, x, row });
    x += wide;
  }
  const rows = keys.length ? row + 1 : 0;
  const { svg, add } = createSvg(width, height + (ramp ? RAMP_HEIGHT + 10 : 0) + ROW * rows);
  plot.setAttribute("overflow", "visible");
  svg.append(plot);
  if (ramp) addRamp(add, ramp, 8, height + 4);
  const top = height + (ramp ? RAMP_HEIGHT + 10 : 0) + ROW / 2;
  for (const key of placed) {
    const y = top + ROW * key.row;
    add("text", { x: key.x, y, "dominant-baseline": "central", "font-size": 14, fill: key.colour }, key.glyph);
    add(
      "text",
      { x: key.x + 18, y, "dominant-baseline": "central", "font-size": 12, fill: "var(--ink)" },
      key.label,
    );
  }
  return svg;
}
