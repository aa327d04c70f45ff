/** Tables as CSV (RFC 4180), in the notation that pandas, polars and R read back. */

export type CsvValue = string | number | null;

/** Numbers are written in full precision, infinities as `inf`, and null as an empty field. */
export function csvOf(header: string[], rows: CsvValue[][]): string {
  return [header, ...rows].map((row) => `${row.map(field).join(",")}\r\n`).join("");
}

function field(value: CsvValue): string {
  if (value === null) return "";
  if (value === Infinity) return "inf";
  if (value === -Infinity) return "-inf";
  const text = String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
