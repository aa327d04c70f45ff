/** Wheel, pinch, drag and keys move a window over a matrix; d3-zoom knows the gestures. */
import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomBehavior, type ZoomTransform } from "d3-zoom";
import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Cursor } from "./drawing";
import { closest, fitting, type Matrix, type Size, type View } from "./viewport";

const MARGIN = 0.1; // of the window, that a cursor keeps from its edge

interface Zoom {
  view: View;
  size: Size;
  /** Zooms around a cell, or the middle. */
  zoomBy: (factor: number, around: Cursor | null) => void;
  /** Moves the window until it holds a cell. */
  show: (cell: Cursor) => void;
  whole: () => void;
}

/** All of it, in the middle of the window. */
function everything(matrix: Matrix, size: Size): ZoomTransform {
  const fit = fitting(matrix, size);
  return zoomIdentity
    .translate((size.width - matrix.keys * fit) / 2, (size.height - matrix.queries * fit) / 2)
    .scale(fit);
}

export function useZoom(plot: RefObject<HTMLDivElement | null>, matrix: Matrix): Zoom {
  const [size, setSize] = useState<Size>({ width: 0, height: 0 });
  const [view, setView] = useState<View>({ x: 0, y: 0, scale: 1 });
  const behaviour = useRef<ZoomBehavior<HTMLDivElement, unknown> | null>(null);
  const fitted = useRef(true);

  useLayoutEffect(() => {
    const element = plot.current;
    if (!element) return;
    const measure = () => setSize({ width: element.clientWidth, height: element.clientHeight });
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    measure();
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    const element = plot.current;
    if (!element || size.width < 1 || size.height < 1) return;
    const fit = fitting(matrix, size);
    const made = zoom<HTMLDivElement, unknown>()
      .extent([
        [0, 0],
        [size.width, size.height],
      ])
      .scaleExtent([fit, closest(matrix, size)])
      .translateExtent([
        [0, 0],
        [matrix.keys, matrix.queries],
      ])
      .on("zoom", ({ transform }) => {
        fitted.current = transform.k <= fit * 1.001;
        setView({ x: transform.x, y: transform.y, scale: transform.k });
      });
    behaviour.current = made;
    const selection = select(element).call(made);
    // The whole stays whole in a window of another size; what was near stays where it was.
    if (fitted.current) selection.call(made.transform, everything(matrix, size));
    else selection.call(made.scaleBy, 1);
    return () => void selection.on(".zoom", null);
  }, [size.width, size.height, matrix]);

  const call = (act: (made: ZoomBehavior<HTMLDivElement, unknown>, element: HTMLDivElement) => void) => {
    if (behaviour.current && plot.current) act(behaviour.current, plot.current);
  };
  const pixel = (token: number, offset: number) => (token + 0.5) * view.scale + offset;
  return {
    view,
    size,
    zoomBy: (factor, around) =>
      call((made, element) => {
        const point: [number, number] | undefined = around
          ? [pixel(around.key, view.x), pixel(around.query, view.y)]
          : undefined;
        made.scaleBy(select(element), factor, point);
      }),
    show: (cell) =>
      call((made, element) => {
        const away = (at: number, extent: number) =>
          at < MARGIN * extent ? MARGIN * extent - at : at > (1 - MARGIN) * extent ? (1 - MARGIN) * extent - at : 0;
        const right = away(pixel(cell.key, view.x), size.width);
        const down = away(pixel(cell.query, view.y), size.height);
        if (right || down) made.translateBy(select(element), right / view.scale, down / view.scale);
      }),
    whole: () => call((made, element) => made.transform(select(element), everything(matrix, size))),
  };
}
