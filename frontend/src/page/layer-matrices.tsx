/** One small matrix a layer: how each two of its heads relate. */
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { unpack, type Place, type Relation } from "../data";
import { scaleOf } from "../parts/colour";
import { Figure } from "../parts/figure";
import { HeatMap, heatSvg, type Heat } from "../parts/heat-map";
import { useWords } from "../parts/language";
import { RampLegend } from "../parts/legend";
import { useDark } from "../parts/theme";
import { useModel } from "./model";
import { pairsOf, rangeOf } from "./relations";

interface Matrix {
  site: number;
  heat: Heat;
  label: string;
  marked: boolean;
}

export function LayerMatrices({ relation, marks }: { relation: Relation; marks: Set<string> }): JSX.Element {
  const model = useModel();
  const words = useWords();
  const { say, text, number } = words;
  const dark = useDark();
  const [pointed, setPointed] = useState<{ one: Place; other: Place; value: number } | null>(null);
  const pairs = useMemo(() => pairsOf(model, relation.name), [model, relation.name]);
  const scale = useMemo(() => scaleOf(...rangeOf(pairs), dark), [pairs, dark]);

  const matrices = useMemo(
    () =>
      Object.entries(model.page.relations).flatMap(([key, relations]): Matrix[] => {
        const packed = relations[relation.name];
        if (!packed) return [];
        const site = Number(key);
        const { shape, values } = unpack(packed);
        const heads = shape[0] ?? 0;
        // A head is always like itself: the diagonal is left blank, so that it does not outshine what is of interest.
        const shown = values.map((value, i) => (i % heads === Math.floor(i / heads) ? NaN : value));
        const stack = model.stackName(site, words);
        const layer = say("layerName", { layer: model.page.sites[site]?.layer ?? site });
        return [
          {
            site,
            heat: { rows: heads, columns: heads, values: shown },
            label: stack ? `${stack}, ${layer}` : layer,
            marked: [...marks].some((mark) => mark.startsWith(`${site}.`)),
          },
        ];
      }),
    [model, relation, words, marks],
  );

  const describe = (matrix: Matrix) => {
    const best = pairs.find((pair) => pair.one[0] === matrix.site);
    if (!best) return matrix.label;
    return say("matrixDescribed", {
      layer: matrix.label,
      one: best.one[1],
      other: best.other[1],
      value: number(best.value),
    });
  };
  return (
    <>
      <div class="matrix-legend">
        <RampLegend scale={scale} format={(x) => number(x)} />
        <p class="readout" aria-hidden="true">
          {pointed
            ? say("pairReadout", {
                one: model.short(pointed.one, words),
                other: model.short(pointed.other, words),
                value: number(pointed.value),
              })
            : say("matrixHint")}
        </p>
      </div>
      <div class="matrices">
        {matrices.map((matrix) => (
          <Figure
            key={matrix.site}
            class={`matrix${matrix.marked ? " marked" : ""}`}
            title={matrix.label}
            name={`layer-${matrix.site}-${relation.name}`}
            fileTitle={`${text(relation.label)}, ${matrix.label}`}
            draw={() => heatSvg(matrix.heat, scale, { across: say("head"), down: say("head"), size: 360 })}
          >
            <HeatMap
              {...matrix.heat}
              scale={scale}
              label={describe(matrix)}
              onPoint={(cell) =>
                setPointed(
                  cell && {
                    one: [matrix.site, cell[0]],
                    other: [matrix.site, cell[1]],
                    value: matrix.heat.values[cell[0] * matrix.heat.columns + cell[1]] ?? NaN,
                  },
                )
              }
            />
          </Figure>
        ))}
      </div>
    </>
  );
}
