/** SVG drawings that are saved as files. */

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

export const CENTRED = { "text-anchor": "middle", "dominant-baseline": "central" };
