/** Colour scales for numbers, ordered in lightness so that hue is not needed to read them, and colours of categories. */
import { interpolateRgbBasis } from "d3-interpolate";

type Ramp = (share: number) => string;

// Seaborn's "mako", starting at the background colour.
const MAKO = ["#2b1c35", "#3e356b", "#3b5698", "#357ba2", "#38aaac", "#78d6ae", "#def5e5"];
const sequentialLight = interpolateRgbBasis(["#f7faf7", ...[...MAKO].reverse()]);
const sequentialDark = interpolateRgbBasis(["#191b25", "#231f38", ...MAKO.slice(1)]);
// Orange below zero, purple above: distinct under every kind of colour blindness.
const DIVERGING_LIGHT = ["#8a3f06", "#d9781c", "#f6c88f", "#f7f7f5", "#c3bbdc", "#7d6cab", "#3d1a66"];
const DIVERGING_DARK = ["#ffd199", "#e0862f", "#7a4516", "#1d1f28", "#4b3a7a", "#8d78c9", "#d9ccff"];
const [divergingLight, divergingDark] = [interpolateRgbBasis(DIVERGING_LIGHT), interpolateRgbBasis(DIVERGING_DARK)];

// On a light and a dark page, chosen for the largest distances in OKLab, also with deuteranopia; a role is also named by
// letters. By name: a run has only the roles that could be measured, and a role has one colour on all pages.
const ROLES: Record<string, [light: string, dark: string]> = {
  induction: ["#77aadd", "#efaf50"],
  pronoun: ["#ee8866", "#6878cf"],
  agreement: ["#1020f0", "#0000e0"],
  "duplicate-token": ["#eedd88", "#9f4800"],
  "same-meaning": ["#ffaabb", "#20cfdf"],
  previous: ["#44bb99", "#189760"],
  next: ["#bbcc33", "#e797df"],
  self: ["#974078", "#703878"],
  positional: ["#507000", "#006018"],
  "long-range": ["#0070af", "#d77068"],
  "rare-token": ["#40e7ff", "#006880"],
  local: ["#af5818", "#78bf70"],
  delimiter: ["#bf70af", "#a7588f"],
  sink: ["#9f9720", "#9f8000"],
  broad: ["#008f80", "#87a7ff"],
  copy: ["#cfa7ff", "#789fa7"],
  "anti-copy": ["#7080d7", "#604838"],
};

/** The colour of what has no value. */
export const noValue = (dark: boolean) => (dark ? "#262933" : "#eceeef");

export interface Scale {
  low: number;
  high: number;
  diverging: boolean;
  /** The colour of a value; `noValue` for null, that of an end beyond the scale. */
  of: (value: number | null | undefined) => string;
  /** The same as red, green and blue, in 256 steps, for images of many cells. */
  paint: (value: number | null | undefined) => Colour;
}

type Colour = readonly [red: number, green: number, blue: number];

const stepCache = new Map<Ramp, Colour[]>();

function stepsOf(ramp: Ramp): Colour[] {
  let steps = stepCache.get(ramp);
  if (!steps) {
    steps = Array.from({ length: 256 }, (_, i) => channels(ramp(i / 255)));
    stepCache.set(ramp, steps);
  }
  return steps;
}

/**
 * The scale from low to high; symmetric around zero where both signs occur. `gamma` below 1 expands small values.
 * It starts at a share of the ramp: at 0, the colour of the background.
 */
export function scaleOf(low: number, high: number, dark: boolean, gamma = 1, start = 0): Scale {
  const diverging = low < 0 && high > 0;
  const ramp = diverging ? (dark ? divergingDark : divergingLight) : dark ? sequentialDark : sequentialLight;
  const widest = Math.max(Math.abs(low), Math.abs(high));
  const from = diverging ? -widest : low;
  const span = diverging ? 2 * widest : high - low;
  const steps = stepsOf(ramp);
  const shareOf = (value: number | null | undefined) => {
    if (value === null || value === undefined || Number.isNaN(value)) return null;
    const share = span > 0 ? Math.min(1, Math.max(0, (value - from) / span)) : 0.5;
    return start + (1 - start) * (gamma === 1 ? share : share ** gamma);
  };
  const of = (value: number | null | undefined) => {
    const share = shareOf(value);
    return share === null ? noValue(dark) : ramp(share);
  };
  const paint = (value: number | null | undefined) => {
    const share = shareOf(value);
    return share === null ? channels(noValue(dark)) : (steps[Math.round(255 * share)] as Colour);
  };
  return { low: from, high: from + span, diverging, of, paint };
}

export function roleColour(name: string, dark: boolean): string {
  return ROLES[name]?.[dark ? 1 : 0] ?? noValue(dark);
}

/** Red, green and blue, 0 to 255. */
function channels(colour: string): [number, number, number] {
  const hex = /^#(..)(..)(..)$/.exec(colour);
  if (hex) return [1, 2, 3].map((i) => parseInt(hex[i] as string, 16)) as [number, number, number];
  return (colour.match(/[\d.]+/g) ?? ["0", "0", "0"]).slice(0, 3).map(Number) as [number, number, number];
}

/** Black or white, whichever has more contrast: at least 4.5. */
export function textColourOn(colour: string): string {
  const [r, g, b] = channels(colour).map((x) => {
    const share = x / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  }) as [number, number, number];
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return luminance > 0.179 ? "#000000" : "#ffffff";
}
