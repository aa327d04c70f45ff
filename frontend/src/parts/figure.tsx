/** A figure with its title, its caption and buttons that save it. */
import type { ComponentChildren, JSX } from "preact";
import { saveCsv, savePng, saveSvg, standalone, titled, type Picture } from "./export";
import { useLocale } from "./language";
import { plainLine } from "./tokens";

export interface FigureProps {
  title: string;
  /** Caption. */
  note?: ComponentChildren;
  /** Name of the saved file, without its extension. */
  name: string;
  /** Title inside the saved file, if it differs. */
  fileTitle?: string;
  /** Draws the figure for a file; null while there is nothing to draw. */
  draw: (() => SVGSVGElement) | null;
  /** The numbers of the figure as CSV, if they can be saved. */
  csv?: () => string;
  /** Controls beside the title. */
  controls?: ComponentChildren;
  class?: string;
  maxWidth?: string;
  children?: ComponentChildren;
}

export function Figure({ title, note, name, fileTitle, draw, csv, controls, ...rest }: FigureProps): JSX.Element {
  const { t } = useLocale();
  const button = (format: string, label: string, save: (picture: Picture, name: string) => void) => {
    const onClick = () => draw && save(standalone(titled(draw(), plainLine(fileTitle ?? title))), name);
    return (
      <button type="button" class="quiet" aria-label={label} disabled={!draw} onClick={onClick}>
        {format}
      </button>
    );
  };
  const style = rest.maxWidth ? { maxWidth: rest.maxWidth } : {};
  return (
    <figure class={`figure ${rest.class ?? ""}`} aria-label={title} style={style}>
      <div class="figure-head">
        <h3>{title}</h3>
        {controls}
        <span class="save">
          {button("SVG", t("saveSvg", { title }), saveSvg)}
          {button("PNG", t("savePng", { title }), savePng)}
          {csv ? <CsvButton title={title} name={name} csv={csv} /> : null}
        </span>
      </div>
      {note ? <figcaption>{note}</figcaption> : null}
      {rest.children}
    </figure>
  );
}

/** Saves numbers as CSV. */
export function CsvButton({ title, name, csv }: Required<Pick<FigureProps, "title" | "name" | "csv">>): JSX.Element {
  const { t } = useLocale();
  return (
    <button type="button" class="quiet" aria-label={t("saveCsv", { title })} onClick={() => saveCsv(csv(), name)}>
      CSV
    </button>
  );
}
