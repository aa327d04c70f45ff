/** Paints the visible part of a map onto a canvas. */
import type { Scale } from "../../parts/colour";
import type { HeadSource } from "./source";
import { levelFor, type Size, type View } from "./viewport";

export interface Cursor {
  query: number;
  key: number;
}

export interface Colours {
  scale: Scale;
  background: string;
}

export function drawMap(
  canvas: HTMLCanvasElement,
  source: HeadSource,
  view: View,
  size: Size,
  { scale, background }: Colours,
  pixelRatio = devicePixelRatio || 1,
): void {
  const context = canvas.getContext("2d");
  const [width, height] = [Math.round(size.width * pixelRatio), Math.round(size.height * pixelRatio)];
  if (!context || width < 1 || height < 1) return;
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = background;
  context.fillRect(0, 0, width, height);
  context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
  const { queries, keys } = source.matrix;
  context.save();
  context.beginPath();
  context.rect(view.x, view.y, keys * view.scale, queries * view.scale); // the last cells may extend beyond the end
  context.clip();
  for (const tile of source.tilesAt(levelFor(view.scale))) {
    const cell = tile.block * view.scale;
    const [x, y] = [tile.firstKey * view.scale + view.x, tile.firstQuery * view.scale + view.y];
    const [wide, high] = [tile.columns * cell, tile.rows * cell];
    if (x > size.width || y > size.height || x + wide < 0 || y + high < 0) continue;
    context.imageSmoothingEnabled = cell < 1;
    context.drawImage(tile.painted(scale), x, y, wide, high);
  }
  context.restore();
}

/** A frame around the cell of the keyboard cursor. */
export function drawCursor(canvas: HTMLCanvasElement, cursor: Cursor, block: number, view: View, colour: string): void {
  const context = canvas.getContext("2d");
  if (!context) return;
  const start = (token: number) => Math.floor(token / block) * block * view.scale;
  const side = Math.max(6, block * view.scale);
  const inset = (side - block * view.scale) / 2;
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.strokeRect(start(cursor.key) + view.x - inset, start(cursor.query) + view.y - inset, side, side);
}
