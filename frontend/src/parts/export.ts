/** Saving a chart: as a self-contained SVG, as a PNG of it, or its numbers as CSV. */
import { createElement, createSvg, SVG_NAMESPACE } from "./svg";

const COPIED_STYLES =
  "fill fill-opacity stroke stroke-width stroke-opacity stroke-dasharray stroke-linecap opacity font-family font-size " +
  "font-weight font-variant text-anchor dominant-baseline";
const PIXELS = 2; // of a PNG, per pixel of the SVG

export interface Picture {
  text: string;
  width: number;
  height: number;
}

/** The chart with all computed styles as attributes, on the background of the page. */
export function standalone(svg: SVGSVGElement, page: Element = document.body): Picture {
  const host = svg.isConnected ? null : document.createElement("div");
  if (host) {
    host.className = "offstage";
    host.append(svg);
    page.append(host);
  }
  try {
    const width = Number(svg.getAttribute("width"));
    const height = Number(svg.getAttribute("height"));
    const copy = svg.cloneNode(true) as SVGSVGElement;
    const copies = [copy, ...copy.querySelectorAll("*")];
    [svg, ...svg.querySelectorAll("*")].forEach((original, i) => {
      const style = getComputedStyle(original);
      for (const name of COPIED_STYLES.split(" ")) copies[i]?.setAttribute(name, style.getPropertyValue(name));
      copies[i]?.removeAttribute("class");
      copies[i]?.removeAttribute("style");
    });
    copy.setAttribute("xmlns", SVG_NAMESPACE);
    copy.setAttribute("viewBox", svg.getAttribute("viewBox") ?? `0 0 ${width} ${height}`);
    copy.prepend(
      createElement("rect", { width: "100%", height: "100%", fill: getComputedStyle(page).backgroundColor }),
    );
    return { text: new XMLSerializer().serializeToString(copy), width, height };
  } finally {
    host?.remove();
  }
}

const LINE = 22;
const LETTER = 9; // approximate width of a letter of the title; a Chinese character takes two

/** The chart below its title. */
export function titled(svg: SVGSVGElement, title: string): SVGSVGElement {
  const width = Number(svg.getAttribute("width"));
  const lines = wrapped(title, Math.floor((width - 16) / LETTER));
  const top = LINE * lines.length + 12;
  const outer = createSvg(width, Number(svg.getAttribute("height")) + top);
  const style = { "font-size": 15, "font-weight": 600, fill: "var(--ink)" };
  lines.forEach((line, i) => outer.add("text", { x: 8, y: LINE * (i + 1), ...style }, line));
  svg.setAttribute("y", String(top));
  svg.setAttribute("overflow", "visible");
  outer.svg.append(svg);
  return outer.svg;
}

/** A text in lines of at most so many letters; a longer word is truncated. */
function wrapped(text: string, letters: number): string[] {
  const widthOf = (part: string) => Array.from(part).reduce((sum, x) => sum + (x.charCodeAt(0) > 0x2e80 ? 2 : 1), 0);
  const lines: string[] = [];
  let line = "";
  for (const word of text.split(/(?<=[\s，。：；])/u)) {
    if (line && widthOf(line + word) > letters) {
      lines.push(line);
      line = "";
    }
    line += Array.from(word).slice(0, letters).join("");
  }
  return [...lines, line].map((each) => each.trim());
}

async function asPng(picture: Picture): Promise<Blob> {
  const address = URL.createObjectURL(new Blob([picture.text], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(picture.width * PIXELS);
    canvas.height = Math.round(picture.height * PIXELS);
    const context = canvas.getContext("2d");
    if (!context) throw new Error("this browser has no 2D canvas");
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!blob) throw new Error("this browser cannot encode PNG");
    return blob;
  } finally {
    URL.revokeObjectURL(address);
  }
}

function save(content: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function saveSvg(picture: Picture, stem: string): void {
  save(new Blob([picture.text], { type: "image/svg+xml" }), `${stem}.svg`);
}

export function saveCsv(text: string, stem: string): void {
  save(new Blob([text], { type: "text/csv" }), `${stem}.csv`);
}

export async function savePng(picture: Picture, stem: string): Promise<void> {
  save(await asPng(picture), `${stem}.png`);
}
