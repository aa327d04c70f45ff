/** One matrix per layer: the similarity of each pair of its heads. */
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { unpack, type Relation } from "../data";
import { scaleOf } from "../parts/colour";
import { Figure } from "../parts/figure";
import { HeatMap, heatSvg, type Heat } from "../parts/heat-map";
import { useLocale } from "../parts/language";
import { RampLegend } from "../parts/legend";
import { useDark } from "../parts/theme";
import { useModel } from "./model";
import { pairsOf, rangeOf, type HeadPair } from "./relations";

interface Matrix {
  site: number;
  heat: Heat;
  label: string;
  marked: boolean;
}

function pairAt({ site, heat }: Matrix, one: number, other: number) {
  return { one: [site, one], other: [site, other], value: heat.values[one * heat.columns + other] ?? NaN } as const;
}

export function LayerMatrices({ relation, marks }: { relation: Relation; marks: Set<string> }): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const { t, text, number } = locale;
  const dark = useDark();
  const [hovered, setHovered] = useState<Omit<HeadPair, "similarity"> | null>(null);
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
        // The diagonal is blank: a head is identical to itself.
        const shown = values.map((value, i) => (i % heads === Math.floor(i / heads) ? NaN : value));
        const stack = model.stackName(site, locale);
        const layer = t("layerName", { layer: model.layer(site) });
        return [
          {
            site,
            heat: { rows: heads, columns: heads, values: shown },
            label: stack ? `${stack}, ${layer}` : layer,
            marked: [...marks].some((mark) => mark.startsWith(`${site}.`)),
          },
        ];
      }),
    [model, relation, locale, marks],
  );

  const describe = (matrix: Matrix) => {
    const best = pairs.find((pair) => pair.one[0] === matrix.site);
    if (!best) return matrix.label;
    return t("matrixDescribed", {
      layer: matrix.label,
      one: model.name(best.one),
      other: model.name(best.other),
      value: number(best.value),
    });
  };
  return (
    <>
      <div class="matrix-legend">
        <RampLegend scale={scale} format={(x) => number(x)} />
        <p class="readout" aria-hidden="true">
          {hovered
            ? t("pairReadout", {
                one: model.shortName(hovered.one, locale),
                other: model.shortName(hovered.other, locale),
                value: number(hovered.value),
              })
            : t("matrixHint")}
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
            draw={() => heatSvg(matrix.heat, { scale, format: number }, { across: t("head"), down: t("head") }, 360)}
          >
            <HeatMap
              {...matrix.heat}
              scale={scale}
              label={describe(matrix)}
              onHover={(cell) => setHovered(cell && pairAt(matrix, ...cell))}
            />
          </Figure>
        ))}
      </div>
    </>
  );
}
