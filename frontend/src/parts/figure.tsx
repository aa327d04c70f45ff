/** A picture with its title, its explanation and the buttons that save it. */
import type { ComponentChildren, JSX } from "preact";
import { savePng, saveSvg, standalone, titled, type Picture } from "./export";
import { useWords } from "./language";
import { plainLine } from "./tokens";

interface FigureProps {
  title: string;
  /** What is shown and how to read it. */
  note?: ComponentChildren;
  /** The file's name without its ending. */
  name: string;
  /** What the file says it shows; the title unless more must be said. */
  fileTitle?: string;
  /** Draws the picture for a file; null while there is nothing to draw. */
  draw: (() => SVGSVGElement) | null;
  /** Controls beside the title. */
  controls?: ComponentChildren;
  class?: string;
  maxWidth?: string;
  children: ComponentChildren;
}

export function Figure({
  title,
  note,
  name,
  fileTitle,
  draw,
  controls,
  children,
  maxWidth,
  ...rest
}: FigureProps): JSX.Element {
  const { say } = useWords();
  const saved = (save: (picture: Picture, name: string) => void) => () => {
    if (draw) save(standalone(titled(draw(), plainLine(fileTitle ?? title))), name);
  };
  return (
    <figure class={`figure ${rest.class ?? ""}`} aria-label={title} style={maxWidth ? { maxWidth } : {}}>
      <div class="figure-head">
        <h3>{title}</h3>
        {controls}
        <span class="save">
          <button
            type="button"
            class="quiet"
            aria-label={say("saveSvg", { title })}
            disabled={!draw}
            onClick={saved(saveSvg)}
          >
            SVG
          </button>
          <button
            type="button"
            class="quiet"
            aria-label={say("savePng", { title })}
            disabled={!draw}
            onClick={saved(savePng)}
          >
            PNG
          </button>
        </span>
      </div>
      {note ? <figcaption>{note}</figcaption> : null}
      {children}
    </figure>
  );
}
