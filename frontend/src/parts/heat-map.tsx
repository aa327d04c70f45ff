/** A matrix as an image: an attention map, or the similarities of the heads of a layer. */
import type { JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Scale } from "./colour";
import { addRamp, createSvg, RAMP_HEIGHT, type Ramp } from "./svg";

export interface Heat {
  rows: number;
  columns: number;
  values: ArrayLike<number>;
}

/** Paints rows of cells onto a canvas, one pixel per cell, from the row `top` on. */
export function paintCells(canvas: HTMLCanvasElement, { rows, columns, values }: Heat, scale: Scale, top = 0): void {
  const context = canvas.getContext("2d");
  if (!context || rows < 1 || columns < 1) return;
  const image = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const colour = scale.paint(values[i]);
    image.data[4 * i] = colour[0];
    image.data[4 * i + 1] = colour[1];
    image.data[4 * i + 2] = colour[2];
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, top);
}

function paint(canvas: HTMLCanvasElement, heat: Heat, scale: Scale): void {
  canvas.width = heat.columns;
  canvas.height = heat.rows;
  paintCells(canvas, heat, scale);
}

interface HeatMapProps extends Heat {
  scale: Scale;
  /** Description for screen readers; empty if the image repeats what is beside it. */
  label: string;
  onHover?: (cell: [row: number, column: number] | null) => void;
}

export function HeatMap({ rows, columns, values, scale, label, onHover }: HeatMapProps): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    if (canvas.current) paint(canvas.current, { rows, columns, values }, scale);
  }, [rows, columns, values, scale]);
  const cellAt = (event: MouseEvent): [number, number] => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    return [Math.min(rows - 1, Math.max(0, row)), Math.min(columns - 1, Math.max(0, column))];
  };
  const described = label ? { role: "img" as const, "aria-label": label } : { "aria-hidden": true };
  return (
    <canvas
      class="heat"
      ref={canvas}
      {...described}
      onMouseMove={onHover && ((event) => onHover(cellAt(event)))}
      onMouseLeave={onHover && (() => onHover(null))}
    />
  );
}

/** The image as a data URL, one pixel per cell. */
export function heatUrl(heat: Heat, scale: Scale): string {
  const canvas = document.createElement("canvas");
  paint(canvas, heat, scale);
  return canvas.toDataURL("image/png");
}

interface HeatAxes {
  across: string;
  down: string;
}

/** The image with its axes and its colour ramp, for a file. */
export function heatSvg(heat: Heat, ramp: Ramp, axes: HeatAxes, size = 480): SVGSVGElement {
  const [left, top] = [34, 30];
  const height = Math.round((size * heat.rows) / Math.max(1, heat.columns));
  const { svg, add } = createSvg(size + left + 12, height + top + RAMP_HEIGHT + 24);
  const picture = { href: heatUrl(heat, ramp.scale), preserveAspectRatio: "none", "image-rendering": "pixelated" };
  const style = { "font-size": 12, fill: "currentColor" };
  add("image", { x: left, y: top, width: size, height, ...picture });
  add("text", { x: left, y: 18, ...style }, `${axes.across} →`);
  add("text", { x: 22, y: top + height, transform: `rotate(-90 22 ${top + height})`, ...style }, `← ${axes.down}`);
  addRamp(add, ramp, left, top + height + 12);
  return svg;
}
