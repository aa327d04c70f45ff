/** Wheel, pinch, drag and keys move a window over a matrix; d3-zoom knows the gestures. */
import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomBehavior, type ZoomTransform } from "d3-zoom";
import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Cursor } from "./drawing";
import type { SharedPosition } from "./position";
import { closest, fitting, type Matrix, type Size, type View } from "./viewport";

const MARGIN = 0.1; // of the window, that a cursor keeps from its edge
const WHOLE = 1.001; // times the scale at which everything is seen, up to which it is the whole

type Behaviour = ZoomBehavior<HTMLDivElement, unknown>;

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

/** The shared position in a window of this size, as near as this matrix comes to it. */
function lookingAt({ position }: SharedPosition, made: Behaviour, matrix: Matrix, size: Size): ZoomTransform {
  if (!position) return everything(matrix, size);
  const scale = Math.min(closest(matrix, size), Math.max(fitting(matrix, size), size.width / position.across));
  const asked = zoomIdentity.translate(-position.key * scale, -position.query * scale).scale(scale);
  return made.constrain()(
    asked,
    [
      [0, 0],
      [size.width, size.height],
    ],
    made.translateExtent(),
  );
}

export function useZoom(plot: RefObject<HTMLDivElement | null>, matrix: Matrix, shared: SharedPosition): Zoom {
  const [size, setSize] = useState<Size>({ width: 0, height: 0 });
  const [view, setView] = useState<View>({ x: 0, y: 0, scale: 1 });
  const behaviour = useRef<Behaviour | null>(null);

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
    let following = false;
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
      .on("zoom", ({ transform: { x, y, k } }) => {
        setView({ x, y, scale: k });
        if (following) return;
        const corner = { query: -y / k, key: -x / k, across: size.width / k };
        shared.move(k <= fit * WHOLE ? null : corner, follow);
      });
    behaviour.current = made;
    const selection = select(element).call(made);
    // The shared position also stays what it is in a window of another size.
    const follow = () => {
      following = true;
      selection.call(made.transform, lookingAt(shared, made, matrix, size));
      following = false;
    };
    follow();
    const leave = shared.subscribe(follow);
    return () => {
      leave();
      selection.on(".zoom", null);
    };
  }, [size.width, size.height, matrix, shared]);

  const call = (act: (made: Behaviour, element: HTMLDivElement) => void) => {
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
