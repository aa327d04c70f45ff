/** Names of heads, layers and stacks. */
import type { HeadId } from "../data";
import { headName as nameOfHead } from "../parts/head-name";
import type { ViewLocale } from "./language";
import type { State } from "./types";

/** Empty for a model with a single stack. */
export function stackName(state: State, layer: number, { t }: ViewLocale): string {
  const info = state.layers[layer];
  if (!info || state.stacks.length < 2) return "";
  if (info.keys !== info.queries) return t("crossAttention");
  if (info.queries === "target") return t("decoder");
  return state.layers.some((other) => other.queries === "target") ? t("encoder") : info.stack;
}

function inStack(state: State, layer: number, name: string, locale: ViewLocale): string {
  const stack = stackName(state, layer, locale);
  return stack ? locale.t("nameInStack", { name, stack }) : name;
}

export function layerName(state: State, layer: number, locale: ViewLocale): string {
  return inStack(state, layer, locale.t("layerName", { layer: state.layers[layer]?.depth ?? layer }), locale);
}

export function headName(state: State, [layer, head]: HeadId, locale: ViewLocale): string {
  const name = nameOfHead(state.layers[layer]?.depth ?? layer, head);
  const origin = state.layers[layer]?.origins[head];
  const full = origin ? locale.t("nameWithOrigin", { name, origin: locale.text(origin) }) : name;
  return inStack(state, layer, full, locale);
}

export function headExists(state: State, [layer, head]: HeadId): boolean {
  return Number.isInteger(layer) && Number.isInteger(head) && head >= 0 && head < (state.layers[layer]?.heads ?? 0);
}

/** All heads in order of depth. */
export function allHeads(state: State): HeadId[] {
  return state.layers.flatMap(({ heads }, layer) => Array.from({ length: heads }, (_, head): HeadId => [layer, head]));
}
