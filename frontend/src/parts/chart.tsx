/** A chart of Observable Plot, as wide as its container. */
import { plot, type PlotOptions } from "@observablehq/plot";
import type { JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { Figure, type FigureProps } from "./figure";
import { useDark } from "./theme";

/** Returns the options of a chart for a width. */
export type Build = (width: number) => PlotOptions;

export const FILE_WIDTH = 760;

/** The chart as an element with a description for screen readers. */
export function drawPlot(options: PlotOptions, label: string): SVGSVGElement {
  const svg = plot({ ...options, figure: false, className: "plot" }) as SVGSVGElement;
  // Plot's own <style> would need an exception in the content security policy; parts.css has the same rules.
  for (const style of svg.querySelectorAll("style")) style.remove();
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  for (const part of svg.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  return svg;
}

export { widthOf } from "./svg";

/** The options of a small chart without axes. */
export function strip(width: number, height: number) {
  return { width, height, margin: 0, marginLeft: 6, marginRight: 6, axis: null };
}

/** Factor by which charts are enlarged on large screens, where the font is larger. */
function zoom(): number {
  return Math.max(1, parseFloat(getComputedStyle(document.documentElement).fontSize) / 17);
}

interface ChartProps {
  build: Build;
  label: string;
  /** Called with each drawing on the page, not with that of a file. */
  decorate?: (svg: SVGSVGElement) => void;
}

export function Chart({ build, label, decorate }: ChartProps): JSX.Element {
  const container = useRef<HTMLDivElement>(null);
  const dark = useDark();
  useLayoutEffect(() => {
    const host = container.current;
    if (!host) return undefined;
    let drawn = 0;
    const draw = () => {
      const width = Math.floor(host.clientWidth);
      if (width === drawn || width === 0) return;
      drawn = width;
      // Plot measures in pixels: with a larger font the whole chart is scaled.
      const svg = drawPlot(build(Math.floor(width / zoom())), label);
      svg.style.width = "100%";
      host.replaceChildren(svg);
      decorate?.(svg);
    };
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(host);
    return () => observer.disconnect();
  }, [build, label, dark, decorate]);
  return <div class="chart" ref={container} />;
}

interface ChartFigureProps extends Omit<FigureProps, "draw"> {
  label: string;
  build: Build;
}

/** A chart as a figure. */
export function ChartFigure({ build, label, children, ...rest }: ChartFigureProps): JSX.Element {
  return (
    <Figure {...rest} draw={() => drawPlot(build(FILE_WIDTH), label)}>
      <Chart build={build} label={label} />
      {children}
    </Figure>
  );
}
