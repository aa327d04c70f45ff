/** SVG drawings that are saved as files. */
import type { Scale } from "./colour";

export const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

export type Attributes = Record<string, string | number>;

export interface Drawing {
  svg: SVGSVGElement;
  add: (tag: string, attributes: Attributes, text?: string) => void;
}

export function createSvg(width: number, height: number): Drawing {
  const svg = createElement("svg", { class: "plot", width, height }) as SVGSVGElement;
  const add = (tag: string, attributes: Attributes, text = "") => {
    const element = createElement(tag, attributes);
    element.textContent = text;
    svg.append(element);
  };
  return { svg, add };
}

export function createElement(tag: string, attributes: Attributes): SVGElement {
  const element = document.createElementNS(SVG_NAMESPACE, tag) as SVGElement;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

const RAMP_STEPS = 48;
const STEP_WIDTH = 4;
/** Height of a colour ramp with its numbers. */
export const RAMP_HEIGHT = 24;

/** A colour ramp with the values at its two ends. */
export interface Ramp {
  scale: Scale;
  format: (value: number) => string;
}

export function addRamp(add: Drawing["add"], { scale, format }: Ramp, x: number, y: number): void {
  const { low, high } = scale;
  for (let step = 0; step < RAMP_STEPS; step++) {
    const fill = scale.of(low + ((step + 0.5) / RAMP_STEPS) * (high - low));
    add("rect", { x: x + step * STEP_WIDTH, y, width: STEP_WIDTH + 0.5, height: 10, fill });
  }
  const ends = { y: y + 22, "font-size": 11, fill: "var(--muted)" };
  add("text", { x, ...ends }, format(low));
  add("text", { x: x + RAMP_STEPS * STEP_WIDTH, "text-anchor": "end", ...ends }, format(high));
}

export const CENTRED = { "text-anchor": "middle", "dominant-baseline": "central" };
