/** Roles of the heads, if the viewer was opened on a run of `polyhead inspect`. */
import type { Page, Role, RoleScore } from "../data";
import { headKey, type State } from "./types";

interface HeadRole {
  role: Role;
  score: RoleScore;
}

export type Roles = Map<string, HeadRole[]>;

/** The roles of the heads of the model, the most informative first. */
export function rolesOf(page: Page, state: State): Roles {
  const roles: Roles = new Map();
  state.layers.forEach(({ run_site }, layer) => {
    for (const head of page.heads.filter(({ site }) => site === run_site)) {
      const supported = page.roles.flatMap((role): HeadRole[] => {
        const score = head.roles.find((one) => one.role === role.name && one.holds);
        return score ? [{ role, score }] : [];
      });
      if (supported.length) roles.set(headKey([layer, head.head]), supported);
    }
  });
  return roles;
}
