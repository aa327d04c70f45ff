/** Text from a corpus is hostile: set as text, the unseen shown by its name, the endless cut. */
import type { JSX } from "preact";

/** How many characters of a token are shown before it is cut. */
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
// Control, format, unassigned, private-use and surrogate characters, ends of lines, and fillers that draw nothing.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Cs}\p{Zl}\p{Zp}\u00a0\u115f\u1160\u3164\uffa0\ufe00-\ufe0f]/u;

export interface Piece {
  text: string;
  /** A name in place of a character that cannot be seen. */
  unseen: boolean;
}

/** A token in pieces that can be shown. */
export function piecesOf(token: string, longest = LONGEST): Piece[] {
  // A character takes at most two units, so that what is endless is never taken apart whole.
  const letters = Array.from(token.slice(0, 2 * longest + 2));
  const cut = letters.length > longest;
  const pieces: Piece[] = [];
  let seen = "";
  for (const letter of cut ? letters.slice(0, longest) : letters) {
    if (!UNSEEN.test(letter) && token.trim() !== "") {
      seen += letter;
      continue;
    }
    if (seen) pieces.push({ text: seen, unseen: false });
    seen = "";
    const code = letter.codePointAt(0) as number;
    pieces.push({ text: NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`, unseen: true });
  }
  if (seen) pieces.push({ text: seen, unseen: false });
  if (cut) pieces.push({ text: `… ${token.length}`, unseen: true });
  if (token === "") pieces.push({ text: "∅", unseen: true });
  return pieces;
}

/** A token as one line of plain text, for names and descriptions. */
export function plainToken(token: string, longest?: number): string {
  return piecesOf(token, longest)
    .map((piece) => (piece.unseen ? `[${piece.text}]` : piece.text))
    .join("")
    .trim();
}

export function Token({ text, longest }: { text: string; longest?: number }): JSX.Element {
  return (
    <bdi class="token">
      {piecesOf(text, longest).map((piece) => (piece.unseen ? <span class="unseen">{piece.text}</span> : piece.text))}
    </bdi>
  );
}

/** The same of a name or a sentence. */
export function plainLine(text: string): string {
  return plainToken(text, LONGEST_LINE);
}

/** A name or a sentence that came with the data. */
export function Line({ text }: { text: string }): JSX.Element {
  return <Token text={text} longest={LONGEST_LINE} />;
}
