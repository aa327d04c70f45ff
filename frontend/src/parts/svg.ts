/** Drawings for files, made by hand. */

const NAMESPACE = "http://www.w3.org/2000/svg";

export type Attributes = Record<string, string | number>;

export interface Drawing {
  svg: SVGSVGElement;
  add: (tag: string, attributes: Attributes, text?: string) => void;
}

export function newDrawing(width: number, height: number): Drawing {
  const svg = document.createElementNS(NAMESPACE, "svg");
  svg.setAttribute("class", "plot");
  svg.setAttribute("width", String(width));
  svg.setAttribute("height", String(height));
  const add = (tag: string, attributes: Attributes, text = "") => {
    const element = document.createElementNS(NAMESPACE, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
    element.textContent = text;
    svg.append(element);
  };
  return { svg, add };
}

export const CENTRED = { "text-anchor": "middle", "dominant-baseline": "central" };
