/** The page's data with what every view asks of it: places by name, roles of a head, values of a column. */
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import type { Column, Head, NumberFormat, Page, Place, Role, RoleScore } from "../data";
import { kindColour, scaleOf, type Scale } from "../parts/colour";
import type { Words } from "../parts/language";
import { hrefOf } from "../parts/router";

export class Model {
  private readonly byPlace = new Map<string, Head>();
  private readonly roleOrder = new Map<string, number>();
  private readonly columnByName = new Map<string, Column>();
  private readonly ranges = new Map<string, [low: number, high: number]>();

  constructor(readonly page: Page) {
    for (const head of page.heads) this.byPlace.set(keyOf([head.site, head.head]), head);
    page.roles.forEach((role, i) => this.roleOrder.set(role.name, i));
    for (const column of page.columns) this.columnByName.set(column.name, column);
  }

  head([site, head]: Place): Head | undefined {
    return this.byPlace.get(keyOf([site, head]));
  }

  column(name: string): Column | undefined {
    return this.columnByName.get(name);
  }

  role(name: string): Role | undefined {
    return this.page.roles[this.roleOrder.get(name) ?? -1];
  }

  roleColour(name: string, dark: boolean): string {
    return kindColour(this.roleOrder.get(name) ?? 0, dark);
  }

  /** The roles a head has, the most telling first. */
  held(head: Head): RoleScore[] {
    const order = (score: RoleScore) => this.roleOrder.get(score.role) ?? this.roleOrder.size;
    return head.roles.filter((score) => score.holds).sort((one, other) => order(one) - order(other));
  }

  /** The heads that have a role, by how far they have it. */
  holding(role: string): Head[] {
    const score = (head: Head) => head.roles.find((one) => one.role === role && one.holds)?.score;
    const heads = this.page.heads.filter((head) => score(head) !== undefined);
    return heads.sort((one, other) => (score(other) ?? 0) - (score(one) ?? 0));
  }

  /** The heads by what the model loses without them, the largest first; none where that was not measured. */
  ranked(): Head[] {
    const name = this.page.importance?.column ?? "";
    const heads = this.page.heads.filter((head) => isNumber(head.values[name]));
    return heads.sort((one, other) => (other.values[name] as number) - (one.values[name] as number));
  }

  /** `2.7`, with the stack before it where a model has several. */
  short([site, head]: Place, words: Words): string {
    const stack = this.stackName(site, words);
    return `${stack ? `${stack} ` : ""}${this.page.sites[site]?.layer ?? "?"}.${head}`;
  }

  /** `Layer 2, head 7`, with what it was before edits. */
  long([site, head]: Place, words: Words): string {
    const name = words.say("place", { layer: this.page.sites[site]?.layer ?? "?", head });
    const origin = this.head([site, head])?.origin;
    const place = origin ? words.say("placeFrom", { place: name, origin: words.text(origin) }) : name;
    const stack = this.stackName(site, words);
    return stack ? words.say("placeIn", { place, stack }) : place;
  }

  stackName(site: number, words: Words): string {
    if (this.page.stacks.length < 2) return "";
    const stack = this.page.stacks.find((one) => one.sites.includes(site));
    return stack ? words.text(stack.label) : "";
  }

  /** The finite values of a column. */
  values(column: string): number[] {
    return this.page.heads.map((head) => head.values[column]).filter(isNumber);
  }

  /** From the least to the largest: as the column says, or as its values are. */
  range(column: Column): [low: number, high: number] {
    let range = this.ranges.get(column.name);
    if (!range) {
      const values = this.values(column.name);
      range = values.length ? [column.low ?? Math.min(...values), column.high ?? Math.max(...values)] : [0, 1];
      this.ranges.set(column.name, range);
    }
    return range;
  }

  scale(column: Column, dark: boolean): Scale {
    return scaleOf(...this.range(column), dark);
  }
}

export function isNumber(value: number | null | undefined): value is number {
  return value !== null && value !== undefined && Number.isFinite(value);
}

export function keyOf([site, head]: Place): string {
  return `${site}.${head}`;
}

export function headHref(place: Place): string {
  return hrefOf(["head", ...place]);
}

/** Places in a link: `0.3~2.7`. */
export function marksOf(places: Place[]): string {
  return places.map(keyOf).join("~");
}

export function markedIn(marks: string | undefined): Set<string> {
  return new Set((marks ?? "").split("~").filter(Boolean));
}

/** A number with its unit. */
export function withUnit(value: number | null | undefined, format: NumberFormat, words: Words): string {
  const number = words.number(value, format);
  if (!isNumber(value) || format === "number" || format === "share") return number;
  return words.say(format === "nats" ? "inNats" : "inTokens", { number });
}

export const ModelContext = createContext<Model | null>(null);

export function useModel(): Model {
  const model = useContext(ModelContext);
  if (!model) throw new Error("a view must stand inside ModelContext");
  return model;
}
