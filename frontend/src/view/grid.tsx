/** Grids of all heads: the attention map of each, or the attention from and to one word. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { hasNaN, part, type HeadId, type Unpacked } from "../data";
import { noValue, roleColour, scaleOf } from "../parts/colour";
import { Figure } from "../parts/figure";
import { gridSvg } from "../parts/grid-svg";
import { HeadGrid, type GridCell, type GridRow } from "../parts/head-grid";
import type { Heat } from "../parts/heat-map";
import { RampLegend } from "../parts/legend";
import { hrefOf } from "../parts/router";
import { useDark } from "../parts/theme";
import { plainToken } from "../parts/tokens";
import { useViewLocale, type ViewLocale } from "./language";
import { colourRange } from "./map/colour-range";
import { headName, layerName, stackName } from "./names";
import { useStore, type Pictures } from "./store";
import { axisOf, headKey, headOf, type Trace } from "./types";
import { rowOf, type Side, type TokenRows } from "./token-rows";

const GAMMA = 0.5; // expands small weights
const STRIP_CELLS = 64; // of the weights of a word
const MAX_LETTERS = 10; // of a token in a cell
const WORD_CELL = { width: 64, height: 44 }; // in a file, with room for a token

const heats = new WeakMap<Unpacked, Map<number, Heat>>(); // unchanged maps are not painted again

/** The map of one head; the sum over a block becomes the mean per query. */
function heatOf(pictures: Pictures | undefined, [layer, head]: HeadId, queries: number): Heat | null {
  const unpacked = pictures?.layers.get(layer);
  if (!pictures || !unpacked) return null;
  const cached = heats.get(unpacked) ?? new Map<number, Heat>();
  heats.set(unpacked, cached);
  let heat = cached.get(head);
  if (!heat) {
    const { shape, values } = part(unpacked, head);
    const [rows = 0, columns = 0] = shape;
    const { block } = pictures.precision;
    const share = (value: number, i: number) => value / Math.min(block, queries - Math.floor(i / columns) * block);
    heat = { rows, columns, values: block === 1 ? values : values.map(share) };
    cached.set(head, heat);
  }
  return heat;
}

/** A row of weights in a few cells, each the maximum of several. */
function stripOf(cells: Float32Array): Heat {
  const each = Math.ceil(cells.length / STRIP_CELLS);
  const columns = Math.ceil(cells.length / each);
  const values = Array.from({ length: columns }, (_, i) => Math.max(0, ...cells.subarray(i * each, (i + 1) * each)));
  const high = colourRange(Math.max(0, ...values));
  return { rows: 1, columns, values: values.map((value) => value / high) };
}

/** A word that is followed through all heads, in one direction. */
interface FollowedWord {
  rows: TokenRows;
  side: Side;
  token: string;
}

interface GridsProps {
  trace: Trace;
  /** Title of a model with a single stack; several have names of their own. */
  title?: string;
  word?: FollowedWord | null;
  marked?: HeadId | null;
  onPick?: (head: HeadId) => void;
  /** Small cells. */
  narrow?: boolean;
  /** Omits the stacks that do not involve the word. */
  onlyInvolved?: boolean;
}

export function Grids({ trace, title, word, marked, onPick, narrow, onlyInvolved }: GridsProps): JSX.Element {
  const store = useStore();
  const { state } = store;
  const locale = useViewLocale();
  const { t, text, number } = locale;
  const dark = useDark();
  const scale = useMemo(() => scaleOf(0, 1, dark, GAMMA), [dark]);
  const pictures = store.pictures.get(trace.id);

  const baseCell = (head: HeadId, name: string): GridCell => {
    const ablated = store.isAblated(head);
    return {
      key: headKey(head),
      href: hrefOf(["head", ...head], trace.slot === "A" ? {} : { text: trace.slot }),
      name: ablated ? `${name}, ${t("ablated")}` : name,
      colour: scale.of(0),
      letters: "",
      faded: false,
      marked: marked ? headKey(head) === headKey(marked) : false,
      ablated,
    };
  };
  const missingCell = (head: HeadId, name: string): GridCell => ({
    ...baseCell(head, `${name}, ${t("notANumber")}`),
    colour: noValue(dark),
    letters: "NaN",
    missing: true,
  });
  const mapCell = (head: HeadId): GridCell => {
    const queries = axisOf(trace, state.layers[head[0]]?.queries ?? "text").tokens.length;
    const heat = heatOf(pictures, head, queries);
    const main = store.roles?.get(headKey(head))?.[0];
    const name = headName(state, head, locale);
    if (heat && hasNaN(heat.values)) return missingCell(head, name);
    return {
      ...baseCell(head, main ? `${name}, ${text(main.role.label)}` : name),
      ...(heat ? { picture: { heat, scale } } : {}),
      ...(main && !narrow ? { letters: main.role.letters, badge: roleColour(main.role.name, dark) } : {}),
    };
  };
  const wordCell = (head: HeadId, { rows, side }: FollowedWord): GridCell => {
    const name = headName(state, head, locale);
    const row = rowOf(rows, head, side);
    const info = state.layers[head[0]];
    if (!row || !info) return { ...baseCell(head, t("notInLayer", { head: name })), faded: true };
    if (hasNaN(row.cells)) return missingCell(head, name);
    const { tokens } = axisOf(trace, side === "attends" ? info.keys : info.queries);
    const best = row.top[0];
    const token = best ? plainToken(tokens[best.token] ?? "") : "";
    const share = number(best?.weight, "share");
    const letters = token.length > MAX_LETTERS ? `${token.slice(0, MAX_LETTERS - 1)}…` : token;
    return {
      ...baseCell(head, t("wordCell", { head: name, token: `“${token}”`, share })),
      letters: `${letters}\n${share}`,
      picture: { heat: stripOf(row.cells), scale },
      badge: dark ? "#14161d" : "#ffffff",
    };
  };

  const isInvolved = (layer: number) => !word || Boolean(word.rows.get(layer)?.[word.side]);
  const stacks = state.stacks.filter((stack) => !onlyInvolved || stack.layers.some(isInvolved));
  const ramp = { scale, format: (x: number) => number(x, "share") };
  const axes = { across: t("gridAcross"), down: t("gridCorner") };
  const legend = word ? t("wordInHeadsAbout") : cellMeaning(pictures, locale);
  return (
    <div class={`grids${word ? " of-word" : ""}${narrow ? " narrow" : ""}`}>
      {stacks.map(({ layers }) => {
        const heads = Math.max(...layers.map((layer) => state.layers[layer]?.heads ?? 0));
        const stack = stackName(state, layers[0] ?? 0, locale);
        const name = stack || title || t("stackOf");
        const columns = Array.from({ length: heads }, (_, head) => String(head));
        const cellOf = (id: HeadId) => {
          if (id[1] >= (state.layers[id[0]]?.heads ?? 0)) return null;
          return word ? wordCell(id, word) : mapCell(id);
        };
        const rows: GridRow[] = layers.map((layer) => ({
          label: String(state.layers[layer]?.depth ?? layer),
          name: layerName(state, layer, locale),
          cells: columns.map((_, head) => cellOf([layer, head])),
        }));
        let shown = `${name}: ${t("byMap")}`;
        if (word) {
          const direction = word.side === "attends" ? "wordAttendsTo" : "wordAttendedBy";
          shown = [t(direction, { word: plainToken(word.token) }), stack].filter(Boolean).join(", ");
        }
        return (
          <Figure
            key={layers.join(" ")}
            class="stack"
            title={name}
            name={`heads-${word ? word.side : "maps"}-${trace.slot}`}
            fileTitle={t("gridFile", { shown, slot: trace.slot, model: state.model.name })}
            maxWidth={narrow ? "100%" : `${7 * heads + 3}rem`}
            draw={() => gridSvg({ legend, ramp, columns, rows, axes, ...(word ? { cell: WORD_CELL } : {}) })}
          >
            <HeadGrid
              label={t("gridLabel", { stack: stack || t("stackOf"), slot: trace.slot })}
              corner={narrow ? "" : axes.down}
              columns={columns}
              columnName={(head) => t("headName", { head })}
              rows={rows}
              {...(onPick ? { onPick: (key: string) => onPick(headOf(key)) } : {})}
            />
          </Figure>
        );
      })}
      {word || narrow ? null : <RampLegend {...ramp} />}
    </div>
  );
}

/** The meaning of a cell of the maps. */
export function cellMeaning(pictures: Pictures | undefined, { t, count }: ViewLocale): string {
  const block = pictures?.precision.block ?? 1;
  return block > 1 ? t("gridBlocks", { block: count(block) }) : t("gridWeights");
}
