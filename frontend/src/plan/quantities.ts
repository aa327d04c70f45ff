/** Numbers with their units, as costs/quantities.py writes them in the tables, and round numbers for axes. */
const significant = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, roundingMode: "halfEven" });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0, roundingMode: "halfEven" });

function scaled(value: number, base: number, units: string[]): string {
  const last = units.length - 1;
  let unit = 0;
  for (; unit < last && value >= base * 0.9995; unit++) value /= base;
  return `${(value < 1000 ? significant : whole).format(value)} ${units[unit]}`.trimEnd();
}

export const FORMATS = {
  bytes: (value: number) => scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]),
  seconds: (value: number) => (value ? scaled(value * 1e6, 1000, ["µs", "ms", "s"]) : "0 s"),
  ratio: (value: number) => `${(value < 10 ? significant : whole).format(value)}x`,
};

export type Unit = keyof typeof FORMATS;

/** The label of a tick: fractions of two below one, which a ratio has as ticks. */
export function tickLabel(value: number, unit: Unit): string {
  return unit === "ratio" && value < 1 ? `1/${Math.round(1 / value)}` : FORMATS[unit](value);
}

/** Ticks of a logarithmic axis that enclose all values. */
export const TICKS = {
  bytes: (values: number[]) => powersAround(values, 1e9),
  seconds: decimalsAround,
  ratio: (values: number[]) => powersAround(values, 1),
};

/** At most ten equidistant powers of two, times a unit. */
function powersAround(values: number[], unit: number): number[] {
  const low = Math.floor(Math.log2(Math.min(...values) / unit));
  const high = Math.max(low + 1, Math.ceil(Math.log2(Math.max(...values) / unit)));
  const step = Math.ceil((high - low) / 8);
  const first = Math.floor(low / step);
  return Array.from({ length: Math.ceil(high / step) - first + 1 }, (_, i) => unit * 2 ** (step * (first + i)));
}

/** Powers of ten with 2 and 5 of them between, or powers of ten alone if those are more than ten. */
function decimalsAround(values: number[]): number[] {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const decades = Array.from(
    { length: Math.ceil(Math.log10(most)) - Math.floor(Math.log10(least)) + 1 },
    (_, i) => Number(`1e${Math.floor(Math.log10(least)) + i}`),
  );
  const fine = decades.flatMap((one) => [one, 2 * one, 5 * one]);
  const first = fine.filter((tick) => tick <= least).length - 1;
  const last = fine.findIndex((tick, i) => tick >= most && i > first);
  return last - first < 10 ? fine.slice(first, last + 1) : decades;
}
