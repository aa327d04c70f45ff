/** What a run of `polyhead inspect` found of each head, where the viewer was opened on one. */
import type { Page, Role, RoleScore } from "../data";
import { headKey, type State } from "./types";

export interface HeldRole {
  role: Role;
  score: RoleScore;
  /** Its number among all roles, which gives it its colour. */
  number: number;
}

export type Roles = Map<string, HeldRole[]>;

/** The roles that heads have, the most telling first, by the places of the model. */
export function rolesOf(page: Page, state: State): Roles {
  const found: Roles = new Map();
  state.places.forEach(({ run_site }, place) => {
    for (const head of page.heads.filter(({ site }) => site === run_site)) {
      const held = page.roles.flatMap((role, number): HeldRole[] => {
        const score = head.roles.find((one) => one.role === role.name && one.holds);
        return score ? [{ role, score, number }] : [];
      });
      if (held.length) found.set(headKey([place, head.head]), held);
    }
  });
  return found;
}
