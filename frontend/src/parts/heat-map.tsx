/** A grid of numbers as a picture: a block map of attention, or how alike the heads of a layer are. */
import type { JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Scale } from "./colour";
import { newDrawing } from "./svg";

export interface Heat {
  rows: number;
  columns: number;
  values: ArrayLike<number>;
}

/** Draws one pixel a cell; the browser makes them larger. */
function paint(canvas: HTMLCanvasElement, heat: Heat, scale: Scale): void {
  canvas.width = heat.columns;
  canvas.height = heat.rows;
  const context = canvas.getContext("2d");
  if (!context || heat.rows === 0 || heat.columns === 0) return;
  const image = context.createImageData(heat.columns, heat.rows);
  const { data } = image;
  for (let i = 0; i < heat.rows * heat.columns; i++) {
    const colour = scale.paint(heat.values[i]);
    data[4 * i] = colour[0];
    data[4 * i + 1] = colour[1];
    data[4 * i + 2] = colour[2];
    data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

interface HeatMapProps extends Heat {
  scale: Scale;
  /** What a reader who cannot see it should know; empty for a picture that only repeats what stands beside it. */
  label: string;
  onPoint?: (cell: [row: number, column: number] | null) => void;
  onPick?: (cell: [row: number, column: number]) => void;
}

export function HeatMap({ rows, columns, values, scale, label, onPoint, onPick }: HeatMapProps): JSX.Element {
  const place = useRef<HTMLCanvasElement>(null);
  useLayoutEffect(() => {
    if (place.current) paint(place.current, { rows, columns, values }, scale);
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
      ref={place}
      {...described}
      onMouseMove={onPoint && ((event) => onPoint(cellAt(event)))}
      onMouseLeave={onPoint && (() => onPoint(null))}
      onClick={onPick && ((event) => onPick(cellAt(event)))}
    />
  );
}

/** The picture as a data address, one pixel a cell. */
export function heatUrl(heat: Heat, scale: Scale): string {
  const canvas = document.createElement("canvas");
  paint(canvas, heat, scale);
  return canvas.toDataURL("image/png");
}

export interface HeatFrame {
  across: string;
  down: string;
  size?: number;
}

/** The same picture for a file, with its axes named. */
export function heatSvg(heat: Heat, scale: Scale, frame: HeatFrame): SVGSVGElement {
  const size = frame.size ?? 480;
  const [left, top] = [34, 30];
  const height = Math.round((size * heat.rows) / Math.max(1, heat.columns));
  const { svg, add } = newDrawing(size + left + 12, height + top + 12);
  const picture = { href: heatUrl(heat, scale), preserveAspectRatio: "none", "image-rendering": "pixelated" };
  add("image", { x: left, y: top, width: size, height, ...picture });
  add("text", { x: left, y: 18, "font-size": 12, fill: "currentColor" }, `${frame.across} →`);
  const turned = `rotate(-90 22 ${top + height})`;
  add("text", { x: 22, y: top + height, "font-size": 12, fill: "currentColor", transform: turned }, `← ${frame.down}`);
  return svg;
}
