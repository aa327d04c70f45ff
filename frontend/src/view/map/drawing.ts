/** Paints what a window shows of a head onto its canvas. */
import type { Scale } from "../../parts/colour";
import type { HeadSource } from "./source";
import { levelFor, type Size, type View } from "./viewport";

export interface Cursor {
  query: number;
  key: number;
}

export interface Colours {
  scale: Scale;
  ground: string;
}

export function drawMap(
  canvas: HTMLCanvasElement,
  source: HeadSource,
  view: View,
  size: Size,
  { scale, ground }: Colours,
  sharpness = devicePixelRatio || 1,
): void {
  const context = canvas.getContext("2d");
  const [width, height] = [Math.round(size.width * sharpness), Math.round(size.height * sharpness)];
  if (!context || width < 1 || height < 1) return;
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = ground;
  context.fillRect(0, 0, width, height);
  context.setTransform(sharpness, 0, 0, sharpness, 0, 0);
  const { queries, keys } = source.matrix;
  context.save();
  context.beginPath();
  context.rect(view.x, view.y, keys * view.scale, queries * view.scale); // the last cells reach over the end
  context.clip();
  for (const sheet of source.sheets(levelFor(view.scale))) {
    const cell = sheet.block * view.scale;
    const [x, y] = [sheet.firstKey * view.scale + view.x, sheet.firstQuery * view.scale + view.y];
    const [wide, high] = [sheet.columns * cell, sheet.rows * cell];
    if (x > size.width || y > size.height || x + wide < 0 || y + high < 0) continue;
    context.imageSmoothingEnabled = cell < 1;
    context.drawImage(sheet.painted(scale), x, y, wide, high);
  }
  context.restore();
}

/** The cell under the keyboard's cursor, framed. */
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
