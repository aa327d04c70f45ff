/** The roles of one head, in words. */
import type { JSX } from "preact";
import { inkOn, kindColour } from "../parts/colour";
import { useDark } from "../parts/theme";
import { useView } from "./language";
import { useStore } from "./store";
import { headKey, type HeadAt } from "./types";

export function RoleList({ head }: { head: HeadAt }): JSX.Element | null {
  const { roles } = useStore();
  const { text, say } = useView();
  const dark = useDark();
  const held = roles?.get(headKey(head));
  if (!roles) return null;
  return (
    <ul class="role-list" aria-label={say("roles")}>
      {(held ?? []).map(({ role, score, number }) => {
        const colour = kindColour(number, dark);
        return (
          <li key={role.name}>
            <span class="swatch" style={{ background: colour, color: inkOn(colour) }}>
              {text(role.label)}
            </span>{" "}
            <span class="muted">{text(score.evidence)}</span>
          </li>
        );
      })}
      {held ? null : <li class="muted">{say("noRole")}</li>}
    </ul>
  );
}
