/** A head's roles as small labels. */
import type { JSX } from "preact";
import type { Head } from "../data";
import { inkOn } from "../parts/colour";
import { useWords } from "../parts/language";
import { useDark } from "../parts/theme";
import { useModel } from "./model";

export function RoleChips({ head }: { head: Head }): JSX.Element {
  const model = useModel();
  const { text, say } = useWords();
  const dark = useDark();
  const held = model.held(head);
  if (!held.length) return <span class="muted">{say("noRole")}</span>;
  return (
    <span class="chips">
      {held.map((score) => {
        const role = model.role(score.role);
        const colour = model.roleColour(score.role, dark);
        return (
          <span class="chip" key={score.role} style={{ background: colour, color: inkOn(colour) }}>
            {role ? text(role.label) : score.role}
          </span>
        );
      })}
    </span>
  );
}
