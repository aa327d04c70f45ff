/** A chart as a file: an SVG that stands by itself, or a PNG of it. */

const STYLED = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "stroke-dasharray",
  "stroke-linecap",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
  "font-variant",
  "text-anchor",
  "dominant-baseline",
] as const;
const NAMESPACE = "http://www.w3.org/2000/svg";
const PIXELS = 2;

export interface Picture {
  text: string;
  width: number;
  height: number;
}

/** The chart with every style written out, on the paper's colour. */
export function standalone(svg: SVGSVGElement, paper: Element = document.body): Picture {
  const host = svg.isConnected ? null : document.createElement("div");
  if (host) {
    host.className = "offstage";
    host.append(svg);
    paper.append(host);
  }
  try {
    const width = Number(svg.getAttribute("width"));
    const height = Number(svg.getAttribute("height"));
    const copy = svg.cloneNode(true) as SVGSVGElement;
    const originals = [svg, ...svg.querySelectorAll("*")];
    const copies = [copy, ...copy.querySelectorAll("*")];
    originals.forEach((original, i) => {
      const style = getComputedStyle(original);
      for (const name of STYLED) copies[i]?.setAttribute(name, style.getPropertyValue(name));
      copies[i]?.removeAttribute("class");
      copies[i]?.removeAttribute("style");
    });
    copy.setAttribute("xmlns", NAMESPACE);
    copy.setAttribute("viewBox", svg.getAttribute("viewBox") ?? `0 0 ${width} ${height}`);
    const background = document.createElementNS(NAMESPACE, "rect");
    background.setAttribute("width", "100%");
    background.setAttribute("height", "100%");
    background.setAttribute("fill", getComputedStyle(paper).backgroundColor);
    copy.prepend(background);
    return { text: new XMLSerializer().serializeToString(copy), width, height };
  } finally {
    host?.remove();
  }
}

const LINE = 22;
const LETTER = 9; // about the width of a letter of the title; a Chinese character takes two

/** The chart under its title, so that the file says what it shows. */
export function titled(svg: SVGSVGElement, title: string): SVGSVGElement {
  const width = Number(svg.getAttribute("width"));
  const lines = wrapped(title, Math.floor((width - 16) / LETTER));
  const top = LINE * lines.length + 12;
  const outer = document.createElementNS(NAMESPACE, "svg");
  outer.setAttribute("class", "plot");
  outer.setAttribute("width", String(width));
  outer.setAttribute("height", String(Number(svg.getAttribute("height")) + top));
  lines.forEach((line, i) => {
    const text = document.createElementNS(NAMESPACE, "text");
    const attributes = { x: 8, y: LINE * (i + 1), "font-size": 15, "font-weight": 600, fill: "var(--ink)" };
    for (const [name, value] of Object.entries(attributes)) text.setAttribute(name, String(value));
    text.textContent = line;
    outer.append(text);
  });
  svg.setAttribute("y", String(top));
  svg.setAttribute("overflow", "visible");
  outer.append(svg);
  return outer;
}

/** A text in lines of at most so many letters; a word that is longer stands alone and is cut. */
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

export async function asPng(picture: Picture): Promise<Blob> {
  const address = URL.createObjectURL(new Blob([picture.text], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(picture.width * PIXELS);
    canvas.height = Math.round(picture.height * PIXELS);
    const context = canvas.getContext("2d");
    if (!context) throw new Error("this browser draws no canvas");
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!blob) throw new Error("this browser writes no PNG");
    return blob;
  } finally {
    URL.revokeObjectURL(address);
  }
}

export function save(content: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export function saveSvg(picture: Picture, stem: string): void {
  save(new Blob([picture.text], { type: "image/svg+xml" }), `${stem}.svg`);
}

export async function savePng(picture: Picture, stem: string): Promise<void> {
  save(await asPng(picture), `${stem}.png`);
}
