/** Zooming and panning of a map by wheel, pinch, drag and keys, with d3-zoom. */
import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomBehavior, type ZoomTransform } from "d3-zoom";
import type { RefObject } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Cursor } from "./drawing";
import type { SharedPosition } from "./position";
import { closest, fitting, type Matrix, type Size, type View } from "./viewport";

const MARGIN = 0.1; // distance of the cursor from the edge, relative to the window
const WHOLE = 1.001; // tolerance of the scale at which the whole matrix fits

type Behaviour = ZoomBehavior<HTMLDivElement, unknown>;

interface Zoom {
  view: View;
  size: Size;
  /** Zooms around a cell, or the centre. */
  zoomBy: (factor: number, around: Cursor | null) => void;
  /** Pans until a cell is visible. */
  show: (cell: Cursor) => void;
  whole: () => void;
}

function extentOf(width: number, height: number): [[number, number], [number, number]] {
  return [
    [0, 0],
    [width, height],
  ];
}

/** The whole matrix, centred. */
function wholeMatrix(matrix: Matrix, size: Size): ZoomTransform {
  const fit = fitting(matrix, size);
  return zoomIdentity
    .translate((size.width - matrix.keys * fit) / 2, (size.height - matrix.queries * fit) / 2)
    .scale(fit);
}

/** The shared position in a window of this size, constrained to this matrix. */
function transformOf({ position }: SharedPosition, behaviour: Behaviour, matrix: Matrix, size: Size): ZoomTransform {
  if (!position) return wholeMatrix(matrix, size);
  const scale = Math.min(closest(matrix, size), Math.max(fitting(matrix, size), size.width / position.across));
  const requested = zoomIdentity.translate(-position.key * scale, -position.query * scale).scale(scale);
  return behaviour.constrain()(requested, extentOf(size.width, size.height), behaviour.translateExtent());
}

export function useZoom(plot: RefObject<HTMLDivElement | null>, matrix: Matrix, shared: SharedPosition): Zoom {
  const [size, setSize] = useState<Size>({ width: 0, height: 0 });
  const [view, setView] = useState<View>({ x: 0, y: 0, scale: 1 });
  const zoomBehaviour = useRef<Behaviour | null>(null);

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
    let isFollowing = false;
    const behaviour = zoom<HTMLDivElement, unknown>()
      .extent(extentOf(size.width, size.height))
      .scaleExtent([fit, closest(matrix, size)])
      .translateExtent(extentOf(matrix.keys, matrix.queries))
      .on("zoom", ({ transform: { x, y, k } }) => {
        setView({ x, y, scale: k });
        if (isFollowing) return;
        const corner = { query: -y / k, key: -x / k, across: size.width / k };
        shared.move(k <= fit * WHOLE ? null : corner, follow);
      });
    zoomBehaviour.current = behaviour;
    const selection = select(element).call(behaviour);
    // The shared position is kept when the window is resized.
    const follow = () => {
      isFollowing = true;
      selection.call(behaviour.transform, transformOf(shared, behaviour, matrix, size));
      isFollowing = false;
    };
    follow();
    const unsubscribe = shared.subscribe(follow);
    return () => {
      unsubscribe();
      selection.on(".zoom", null);
    };
  }, [size.width, size.height, matrix, shared]);

  const call = (act: (behaviour: Behaviour, element: HTMLDivElement) => void) => {
    if (zoomBehaviour.current && plot.current) act(zoomBehaviour.current, plot.current);
  };
  const pixel = (token: number, offset: number) => (token + 0.5) * view.scale + offset;
  return {
    view,
    size,
    zoomBy: (factor, around) =>
      call((behaviour, element) => {
        const point: [number, number] | undefined = around
          ? [pixel(around.key, view.x), pixel(around.query, view.y)]
          : undefined;
        behaviour.scaleBy(select(element), factor, point);
      }),
    show: (cell) =>
      call((behaviour, element) => {
        const away = (at: number, extent: number) =>
          at < MARGIN * extent ? MARGIN * extent - at : at > (1 - MARGIN) * extent ? (1 - MARGIN) * extent - at : 0;
        const right = away(pixel(cell.key, view.x), size.width);
        const down = away(pixel(cell.query, view.y), size.height);
        if (right || down) behaviour.translateBy(select(element), right / view.scale, down / view.scale);
      }),
    whole: () => call((behaviour, element) => behaviour.transform(select(element), wholeMatrix(matrix, size))),
  };
}
