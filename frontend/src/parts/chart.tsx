/** A chart of Observable Plot, as wide as its place. */
import { plot, type PlotOptions } from "@observablehq/plot";
import type { ComponentChildren, JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { Figure } from "./figure";
import { useDark } from "./theme";

/** Says what to draw at a width. */
export type Build = (width: number) => PlotOptions;

const FILE_WIDTH = 760;

/** The chart as an element, its description beside it. */
export function drawPlot(options: PlotOptions, label: string): SVGSVGElement {
  const svg = plot({ ...options, figure: false, className: "plot" }) as SVGSVGElement;
  // Plot's own <style> would need an exception in the content security policy; parts.css says the same.
  for (const style of svg.querySelectorAll("style")) style.remove();
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const part of svg.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  return svg;
}

/** About how many pixels a label takes at 12 px; a Chinese character is twice as wide as a letter. */
export function widthOf(label: string): number {
  return Array.from(label).reduce((sum, letter) => sum + (letter.charCodeAt(0) > 0x2e80 ? 12.5 : 6.6), 0);
}

/** How much larger than 16 pixels a letter is; phones and desks are drawn as they are. */
function zoom(): number {
  return Math.max(1, parseFloat(getComputedStyle(document.documentElement).fontSize) / 17);
}

export function Chart({ build, label }: { build: Build; label: string }): JSX.Element {
  const place = useRef<HTMLDivElement>(null);
  const dark = useDark();
  useLayoutEffect(() => {
    const host = place.current;
    if (!host) return undefined;
    let drawn = 0;
    const draw = () => {
      const width = Math.floor(host.clientWidth);
      if (width === drawn || width === 0) return;
      drawn = width;
      // Plot counts in pixels: on a wall, where letters are larger, the whole chart grows with them.
      const svg = drawPlot(build(Math.floor(width / zoom())), label);
      svg.style.width = "100%";
      host.replaceChildren(svg);
    };
    draw();
    const watcher = new ResizeObserver(draw);
    watcher.observe(host);
    return () => watcher.disconnect();
  }, [build, label, dark]);
  return <div class="chart" ref={place} />;
}

interface ChartFigureProps {
  title: string;
  note?: ComponentChildren;
  name: string;
  fileTitle?: string;
  label: string;
  build: Build;
  controls?: ComponentChildren;
  class?: string;
  children?: ComponentChildren;
}

/** A chart with its title and the buttons that save it. */
export function ChartFigure({ build, label, children, ...rest }: ChartFigureProps): JSX.Element {
  return (
    <Figure {...rest} draw={() => drawPlot(build(FILE_WIDTH), label)}>
      <Chart build={build} label={label} />
      {children}
    </Figure>
  );
}
