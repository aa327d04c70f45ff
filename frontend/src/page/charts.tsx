/** Charts for papers: any column as a heat map of layers by heads, and two columns as a scatter plot. */
import type { JSX } from "preact";
import type { Column } from "../data";
import { Select } from "../parts/controls";
import { useLocale } from "../parts/language";
import { replaceQuery, type Query, type Route } from "../parts/router";
import { ColumnExplained, ColumnOptions } from "./column-name";
import { useModel, type Model } from "./model";
import { COLOURINGS, Scatter, type Colouring } from "./scatter";
import { StackGrids } from "./stack-grid";

/** The first of some columns that the table has. */
function firstOf(model: Model, names: (string | undefined)[]): Column | undefined {
  const columns = names.map((name) => model.column(name ?? ""));
  return columns.find((column) => column !== undefined) ?? model.page.columns[0];
}

export function Charts({ route }: { route: Route }): JSX.Element {
  const model = useModel();
  const { t } = useLocale();
  const { query } = route;
  const importance = model.page.importance?.column;
  const column = firstOf(model, [query.column, "entropy"]);
  const x = firstOf(model, [query.x, "entropy"]);
  const y = firstOf(model, [query.y, importance, "mean_distance"]);
  const colouring = COLOURINGS.find((one) => one === query.by) ?? "layer";
  const set = (changes: Query) => replaceQuery(route, changes);
  return (
    <>
      <h2 tabIndex={-1}>{t("charts")}</h2>
      <p class="lead">{t("chartsAbout")}</p>
      {column && x && y ? (
        <>
          <section aria-labelledby="heat-maps">
            <h2 id="heat-maps">{t("gridTitle")}</h2>
            <div class="controls">
              <Select label={t("whichColumn")} value={column.name} onChange={(value) => set({ column: value })}>
                <ColumnOptions />
              </Select>
              <label>
                <input
                  type="checkbox"
                  checked={query.numbers === "1"}
                  onChange={(event) => set({ numbers: event.currentTarget.checked ? 1 : null })}
                />
                {t("numbersInCells")}
              </label>
            </div>
            <ColumnExplained column={column} />
            <StackGrids color={column.name} letters={query.numbers === "1" ? "numbers" : "none"} />
          </section>
          <section class="scatter" aria-labelledby="scatter">
            <h2 id="scatter">{t("scatter")}</h2>
            <div class="controls">
              <Select label={t("scatterX")} value={x.name} onChange={(value) => set({ x: value })}>
                <ColumnOptions />
              </Select>
              <Select label={t("scatterY")} value={y.name} onChange={(value) => set({ y: value })}>
                <ColumnOptions />
              </Select>
              <Select label={t("colourBy")} value={colouring} onChange={(value) => set({ by: value })}>
                {COLOURINGS.map((one: Colouring) => (
                  <option value={one}>{t(`colouring_${one}`)}</option>
                ))}
              </Select>
            </div>
            <Scatter x={x} y={y} colouring={colouring} />
          </section>
        </>
      ) : null}
    </>
  );
}
