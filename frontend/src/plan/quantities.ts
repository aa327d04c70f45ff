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
  count: (value: number) => scaled(value, 1000, ["", "K", "M", "G", "T", "P", "E"]),
  bytes: (value: number) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]),
  seconds: (value: number) => (value ? scaled(value * 1e6, 1000, ["µs", "ms", "s"]) : "0 s"),
  ratio: (value: number) => `${(value < 10 ? significant : whole).format(value)}x`,
};

/** Ticks of a binary axis from zero: at most six multiples of a power of two, the last above all values. */
export function multiplesUpTo(largest: number): number[] {
  const step = 2 ** Math.ceil(Math.log2(largest / 5));
  return Array.from({ length: Math.ceil(largest / step) + 1 }, (_, i) => step * i);
}

/** Ticks of a logarithmic axis: at most ten equidistant powers of two that enclose all values. */
export function powersAround(values: number[]): number[] {
  const low = Math.floor(Math.log2(Math.min(...values)));
  const high = Math.max(low + 1, Math.ceil(Math.log2(Math.max(...values))));
  const step = Math.ceil((high - low) / 8);
  const first = Math.floor(low / step);
  return Array.from({ length: Math.ceil(high / step) - first + 1 }, (_, i) => 2 ** (step * (first + i)));
}
