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
/** Height of a colour ramp with its numbers; its width is that of its steps. */
export const RAMP_HEIGHT = 30;

export const RAMP_WIDTH = RAMP_STEPS * STEP_WIDTH;

/** A colour ramp with the values at its two ends and in the middle. */
export interface Ramp {
  scale: Scale;
  format: (value: number) => string;
  /** What a cell without a value is called, if there are any. */
  missing?: string;
}

export function addRamp(add: Drawing["add"], { scale, format, missing }: Ramp, x: number, y: number): void {
  const { low, high } = scale;
  for (let step = 0; step < RAMP_STEPS; step++) {
    const fill = scale.of(low + ((step + 0.5) / RAMP_STEPS) * (high - low));
    add("rect", { x: x + step * STEP_WIDTH, y, width: STEP_WIDTH + 0.5, height: 10, fill });
  }
  const ends = { y: y + 22, "font-size": 11, fill: "var(--muted)" };
  add("text", { x, ...ends }, format(low));
  add("text", { x: x + RAMP_WIDTH / 2, "text-anchor": "middle", ...ends }, format((low + high) / 2));
  add("text", { x: x + RAMP_WIDTH, "text-anchor": "end", ...ends }, format(high));
  if (!missing) return;
  addMissing(add, { x: x + RAMP_WIDTH + 16, y, width: 10, height: 10 }, scale.of(null));
  add("text", { ...ends, x: x + RAMP_WIDTH + 32, y: y + 9 }, missing);
}

/** A cell without a value, struck through as on the page. */
export function addMissing(add: Drawing["add"], box: Box, fill: string): void {
  add("rect", { ...box, rx: 3, fill });
  const [right, bottom] = [box.x + box.width, box.y + box.height];
  add("line", { x1: box.x, y1: box.y, x2: right, y2: bottom, stroke: "var(--muted)", "stroke-width": 1 });
}

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export const CENTRED = { "text-anchor": "middle", "dominant-baseline": "central" };

/** Approximate width of a label at 12 px; a Chinese character is twice as wide as a letter. */
export function widthOf(label: string): number {
  return Array.from(label).reduce((sum, letter) => sum + (letter.charCodeAt(0) > 0x2e80 ? 12.5 : 6.6), 0);
}
