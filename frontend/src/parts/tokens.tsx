/** Untrusted text: set as text, with invisible characters shown by name and long tokens truncated. */
import type { JSX } from "preact";

/** Characters of a token after which it is truncated. */
const LONGEST = 40;
const LONGEST_LINE = 400;

const NAMES: Record<number, string> = {
  0x09: "TAB",
  0x0a: "LF",
  0x0d: "CR",
  0x20: "␣",
  0xa0: "NBSP",
  0xad: "SHY",
  0x200b: "ZWSP",
  0x200c: "ZWNJ",
  0x200d: "ZWJ",
  0x200e: "LRM",
  0x200f: "RLM",
  0x202a: "LRE",
  0x202b: "RLE",
  0x202c: "PDF",
  0x202d: "LRO",
  0x202e: "RLO",
  0x2060: "WJ",
  0x2066: "LRI",
  0x2067: "RLI",
  0x2068: "FSI",
  0x2069: "PDI",
  0xfeff: "BOM",
};
// Control, format, unassigned, private-use and surrogate characters, line separators, and blank fillers.
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Cs}\p{Zl}\p{Zp}\u00a0\u115f\u1160\u3164\uffa0\ufe00-\ufe0f]/u;

interface Piece {
  text: string;
  /** The name of an invisible character. */
  invisible: boolean;
}

/** A token as visible pieces. */
function piecesOf(token: string, longest = LONGEST): Piece[] {
  // A character takes at most two units; a very long token is never split as a whole.
  const letters = Array.from(token.slice(0, 2 * longest + 2));
  const truncated = letters.length > longest;
  const pieces: Piece[] = [];
  let visible = "";
  for (const letter of truncated ? letters.slice(0, longest) : letters) {
    if (!INVISIBLE.test(letter) && token.trim() !== "") {
      visible += letter;
      continue;
    }
    if (visible) pieces.push({ text: visible, invisible: false });
    visible = "";
    const code = letter.codePointAt(0) as number;
    pieces.push({ text: NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`, invisible: true });
  }
  if (visible) pieces.push({ text: visible, invisible: false });
  if (truncated) pieces.push({ text: `… ${token.length}`, invisible: true });
  if (token === "") pieces.push({ text: "∅", invisible: true });
  return pieces;
}

/** A token as one line of plain text, for names and descriptions. */
export function plainToken(token: string, longest?: number): string {
  return piecesOf(token, longest)
    .map((piece) => (piece.invisible ? `[${piece.text}]` : piece.text))
    .join("")
    .trim();
}

export function Token({ text, longest }: { text: string; longest?: number }): JSX.Element {
  return (
    <bdi class="token">
      {piecesOf(text, longest).map((piece) =>
        piece.invisible ? <span class="invisible">{piece.text}</span> : piece.text,
      )}
    </bdi>
  );
}

/** The same for a name or a sentence. */
export function plainLine(text: string): string {
  return plainToken(text, LONGEST_LINE);
}

/** A name or a sentence that came with the data. */
export function Line({ text }: { text: string }): JSX.Element {
  return <Token text={text} longest={LONGEST_LINE} />;
}
