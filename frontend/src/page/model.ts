/** The data of the page with lookups: heads by id, roles of a head, values of a column. */
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { unpackColumn, type Column, type Head, type HeadId, type NumberFormat } from "../data";
import type { Page, Role, RoleScore } from "../data";
import { scaleOf, type Scale } from "../parts/colour";
import { headKey as keyOf, headName } from "../parts/head-name";
import type { Locale } from "../parts/language";
import { hrefOf } from "../parts/router";

export class Model {
  private readonly heads: Map<string, Head>;
  private readonly columns: Map<string, Column>;
  private readonly roleOrder: Map<string, number>;
  private readonly table: Map<string, (number | null)[]>;
  private readonly rows: Map<Head, number>;

  constructor(readonly page: Page) {
    this.heads = new Map(page.heads.map((head) => [keyOf(idOf(head)), head]));
    this.columns = new Map(page.columns.map((column) => [column.name, column]));
    this.roleOrder = new Map(page.roles.map((role, i) => [role.name, i]));
    this.table = new Map(Object.entries(page.table).map(([name, packed]) => [name, unpackColumn(packed)]));
    this.rows = new Map(page.heads.map((head, row) => [head, row]));
  }

  /** A number of the table, in full precision; null where it is undefined or was not computed. */
  value(head: Head | undefined, column: string): number | null {
    return (head && this.table.get(column)?.[this.rows.get(head) ?? -1]) ?? null;
  }

  head(id: HeadId): Head | undefined {
    return this.heads.get(keyOf(id));
  }

  column(name: string): Column | undefined {
    return this.columns.get(name);
  }

  role(name: string): Role | undefined {
    return this.page.roles[this.roleOrder.get(name) ?? -1];
  }

  /** The roles of a head, the most informative first. */
  rolesOf(head: Head): RoleScore[] {
    const order = (score: RoleScore) => this.roleOrder.get(score.role) ?? this.roleOrder.size;
    return head.roles.filter((score) => score.holds).sort((one, other) => order(one) - order(other));
  }

  hasRole(head: Head, role: string): boolean {
    return head.roles.some((score) => score.role === role && score.holds);
  }

  /** The heads with a role, by descending score. */
  headsWithRole(role: string): Head[] {
    const score = (head: Head) => head.roles.find((one) => one.role === role)?.score ?? 0;
    const heads = this.page.heads.filter((head) => this.hasRole(head, role));
    return heads.sort((one, other) => score(other) - score(one));
  }

  /** The heads by descending importance; empty if it was not measured. */
  ranked(): Head[] {
    const name = this.page.importance?.column ?? "";
    const heads = this.page.heads.filter((head) => isNumber(this.value(head, name)));
    return heads.sort((one, other) => (this.value(other, name) as number) - (this.value(one, name) as number));
  }

  /** The index of a layer in its stack. */
  layer(site: number): number | string {
    return this.page.sites[site]?.layer ?? "?";
  }

  /** `L2H7`, as commands take it. */
  name([site, head]: HeadId): string {
    return headName(this.layer(site), head);
  }

  /** `L2H7`, after the name of the stack if there are several. */
  shortName(id: HeadId, locale: Locale): string {
    const stack = this.stackName(id[0], locale);
    return `${stack ? `${stack} ` : ""}${this.name(id)}`;
  }

  /** `L2H7`, with the origin of the head in the unedited model and the stack if there are several. */
  fullName(id: HeadId, locale: Locale): string {
    let name = this.name(id);
    const origin = this.head(id)?.origin;
    if (origin) name = locale.t("nameWithOrigin", { name, origin: locale.text(origin) });
    const stack = this.stackName(id[0], locale);
    return stack ? locale.t("nameInStack", { name, stack }) : name;
  }

  /** Empty for a model with a single stack. */
  stackName(site: number, locale: Locale): string {
    if (this.page.stacks.length < 2) return "";
    const stack = this.page.stacks.find((one) => one.sites.includes(site));
    return stack ? locale.text(stack.label) : "";
  }

  /** The finite values of a column, which is also null where a value is undefined, and may be infinite. */
  values(column: string): number[] {
    return (this.table.get(column) ?? []).filter(isNumber);
  }

  /** The range of a column: that of its values, widened to the declared one. */
  range(column: Column): [low: number, high: number] {
    const values = this.values(column.name);
    if (!values.length) return [0, 1];
    const declared = [column.low, column.high].filter(isNumber);
    return [Math.min(...values, ...declared), Math.max(...values, ...declared)];
  }

  scale(column: Column, dark: boolean): Scale {
    return scaleOf(...this.range(column), dark);
  }
}

export function isNumber(value: number | null | undefined): value is number {
  return value !== null && value !== undefined && Number.isFinite(value);
}

export function idOf(head: Head): HeadId {
  return [head.site, head.head];
}

export { keyOf };

/** Sorts heads by layer. */
export function orderOf([site, head]: HeadId): number {
  return site * 10_000 + head;
}

export function headHref(id: HeadId): string {
  return hrefOf(["head", ...id]);
}

/** Marked heads in a link, by site and head: `0.3~2.7`. */
export function marksOf(ids: HeadId[]): string {
  return ids.map(keyOf).join("~");
}

export function markedIn(marks: string | undefined): Set<string> {
  return new Set((marks ?? "").split("~").filter(Boolean));
}

/** A number with its unit. */
export function withUnit(value: number | null | undefined, format: NumberFormat, locale: Locale): string {
  const number = locale.number(value, format);
  if (!isNumber(value) || format === "number" || format === "share") return number;
  return locale.t(format === "nats" ? "inNats" : "inTokens", { number });
}

export const ModelContext = createContext<Model | null>(null);

export function useModel(): Model {
  const model = useContext(ModelContext);
  if (!model) throw new Error("a view must be inside ModelContext");
  return model;
}
