/** Every head at once: a picture of its attention, or one word's place in it. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { part, type Unpacked } from "../data";
import { kindColour, scaleOf, type Scale } from "../parts/colour";
import { Figure } from "../parts/figure";
import { gridSvg } from "../parts/grid-svg";
import { HeadGrid, type GridCell, type GridRow } from "../parts/head-grid";
import type { Heat } from "../parts/heat-map";
import { hrefOf } from "../parts/router";
import { useDark } from "../parts/theme";
import { plainToken } from "../parts/tokens";
import { highest } from "./exposure";
import { useView, type ViewWords } from "./language";
import { headName, layerName, stackName } from "./names";
import { useStore, type Pictures, type Store } from "./store";
import { axisOf, headKey, headOf, type HeadAt, type Reading, type Slot } from "./types";
import { rowOf, type Side, type WordRows } from "./words";

const BEND = 0.5; // small shares are seen
const STRIP = 64; // cells of a word's strip
const LETTERS = 10; // of a token, that a cell has room for
const WORD_CELL = { width: 64, height: 44 }; // in a file, with room for a token

export function hrefOfHead([place, head]: HeadAt, slot: Slot): string {
  return hrefOf(["head", place, head], slot === "A" ? {} : { text: slot });
}

const heats = new WeakMap<Unpacked, Map<number, Heat>>(); // so that a picture that did not change is not painted again

/** The picture of one head; a sum over a block becomes the mean share of its queries. */
function heatOf(pictures: Pictures | undefined, [place, head]: HeadAt, queries: number): Heat | null {
  const found = pictures?.places.get(place);
  if (!pictures || !found) return null;
  const known = heats.get(found) ?? new Map<number, Heat>();
  heats.set(found, known);
  let heat = known.get(head);
  if (!heat) {
    const { shape, values } = part(found, head);
    const [rows = 0, columns = 0] = shape;
    const { block } = pictures.how;
    const share = (value: number, i: number) => value / Math.min(block, queries - Math.floor(i / columns) * block);
    heat = { rows, columns, values: block === 1 ? values : values.map(share) };
    known.set(head, heat);
  }
  return heat;
}

/** Long rows in few cells, each the largest of those it stands for. */
function strip(cells: Float32Array): Heat {
  const each = Math.ceil(cells.length / STRIP);
  const columns = Math.ceil(cells.length / each);
  const values = Array.from({ length: columns }, (_, i) => Math.max(0, ...cells.subarray(i * each, (i + 1) * each)));
  const high = highest(Math.max(0, ...values));
  return { rows: 1, columns, values: values.map((value) => value / high) };
}

interface Drawn {
  store: Store;
  reading: Reading;
  scale: Scale;
  dark: boolean;
  narrow: boolean;
  words: ViewWords;
}

function pictureCell(drawn: Drawn, head: HeadAt, marked: string | null): GridCell {
  const { store, reading, scale, words } = drawn;
  const queries = axisOf(reading, store.state.places[head[0]]?.queries ?? "text").tokens.length;
  const heat = heatOf(store.pictures.get(reading.id), head, queries);
  const role = store.roles?.get(headKey(head))?.[0];
  const name = headName(store.state, head, words);
  return {
    ...plainCell(drawn, head, role ? `${name}, ${words.text(role.role.label)}` : name, marked),
    ...(heat ? { picture: { heat, scale } } : {}),
    ...(role && !drawn.narrow ? { letters: role.role.letters, badge: kindColour(role.number, drawn.dark) } : {}),
  };
}

function plainCell(
  { store, reading, words, scale }: Drawn,
  head: HeadAt,
  name: string,
  marked: string | null,
): GridCell {
  const off = store.isOff(head);
  return {
    key: headKey(head),
    href: hrefOfHead(head, reading.slot),
    name: off ? `${name}, ${words.say("isOff")}` : name,
    colour: scale.of(0),
    letters: "",
    faded: false,
    marked: headKey(head) === marked,
    off,
  };
}

function wordCell(drawn: Drawn, head: HeadAt, rows: WordRows, side: Side, marked: string | null): GridCell {
  const { store, reading, words, scale } = drawn;
  const name = headName(store.state, head, words);
  const row = rowOf(rows, head, side);
  const info = store.state.places[head[0]];
  if (!row || !info) return { ...plainCell(drawn, head, words.say("notHere", { head: name }), marked), faded: true };
  const { tokens } = axisOf(reading, side === "attends" ? info.keys : info.queries);
  const best = row.top[0];
  const token = best ? plainToken(tokens[best.token] ?? "") : "";
  const share = words.number(best?.weight, "share");
  const letters = token.length > LETTERS ? `${token.slice(0, LETTERS - 1)}…` : token;
  const told = words.say("wordCell", { head: name, token: `“${token}”`, share });
  return {
    ...plainCell(drawn, head, told, marked),
    letters: `${letters}\n${share}`,
    picture: { heat: strip(row.cells), scale },
    badge: drawn.dark ? "#14161d" : "#ffffff",
  };
}

/** A word that is followed through the heads, in one direction. */
interface FollowedWord {
  rows: WordRows;
  side: Side;
  token: string;
}

interface GridsProps {
  reading: Reading;
  /** What is shown, where the model has one stack alone; several have names of their own. */
  title?: string;
  word?: FollowedWord | null;
  marked?: HeadAt | null;
  onPick?: (head: HeadAt) => void;
  /** Small cells, beside something larger. */
  narrow?: boolean;
  /** Stacks in which a word has no part are left out. */
  onlyParts?: boolean;
}

export function Grids({ reading, title, word, marked, onPick, narrow, onlyParts }: GridsProps): JSX.Element {
  const store = useStore();
  const words = useView();
  const { say } = words;
  const dark = useDark();
  const scale = useMemo(() => scaleOf(0, 1, dark, BEND), [dark]);
  const drawn = { store, reading, scale, words, dark, narrow: narrow ?? false };
  const mark = marked ? headKey(marked) : null;
  const cellOf = (head: HeadAt) =>
    word ? wordCell(drawn, head, word.rows, word.side, mark) : pictureCell(drawn, head, mark);
  const hasPart = (place: number) => !word || Boolean(word.rows.get(place)?.[word.side]);
  const stacks = store.state.stacks.filter((stack) => !onlyParts || stack.places.some(hasPart));
  const followed = word
    ? say(word.side === "attends" ? "wordLooksAt" : "wordSeenBy", { word: plainToken(word.token) })
    : "";
  return (
    <div class={`grids${word ? " of-word" : ""}${narrow ? " narrow" : ""}`}>
      {stacks.map((stack) => {
        const heads = Math.max(...stack.places.map((place) => store.state.places[place]?.heads ?? 0));
        const stackTitle = stackName(store.state, stack.places[0] ?? 0, words);
        const name = stackTitle || title || say("stackOf");
        const columns = Array.from({ length: heads }, (_, head) => String(head));
        const rows: GridRow[] = stack.places.map((place) => ({
          label: String(store.state.places[place]?.layer ?? place),
          name: layerName(store.state, place, words),
          cells: columns.map((_, head) =>
            head < (store.state.places[place]?.heads ?? 0) ? cellOf([place, head]) : null,
          ),
        }));
        const shown = followed ? [followed, stackTitle].filter(Boolean).join(", ") : `${name}: ${say("byMap")}`;
        return (
          <Figure
            key={stack.places.join(" ")}
            class="stack"
            title={name}
            name={`heads-${word ? word.side : "maps"}-${reading.slot}`}
            fileTitle={say("gridFile", { shown, slot: reading.slot, model: store.state.model.name })}
            maxWidth={narrow ? "100%" : `${7 * heads + 3}rem`}
            draw={() =>
              word
                ? gridSvg({ legend: say("wordInHeadsAbout"), columns, rows, cell: WORD_CELL })
                : gridSvg({ legend: cellMeaning(store.pictures.get(reading.id), words), columns, rows })
            }
          >
            <HeadGrid
              label={say("gridLabel", { stack: stackTitle || say("stackOf"), slot: reading.slot })}
              corner=""
              columns={columns}
              columnName={(head) => say("headName", { head })}
              rows={rows}
              {...(onPick ? { onPick: (key: string) => onPick(headOf(key)) } : {})}
            />
          </Figure>
        );
      })}
    </div>
  );
}

/** What a cell of the pictures stands for. */
export function cellMeaning(pictures: Pictures | undefined, { say, count }: ViewWords): string {
  const block = pictures?.how.block ?? 1;
  return block > 1 ? say("gridBlocks", { block: count(block) }) : say("gridWeights");
}
