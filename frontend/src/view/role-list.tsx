/** The roles of one head, with their evidence. */
import type { JSX } from "preact";
import type { HeadId } from "../data";
import { roleColour, textColourOn } from "../parts/colour";
import { useDark } from "../parts/theme";
import { useViewLocale } from "./language";
import { useStore } from "./store";
import { headKey } from "./types";

export function RoleList({ head }: { head: HeadId }): JSX.Element | null {
  const { roles } = useStore();
  const { text, t } = useViewLocale();
  const dark = useDark();
  if (!roles) return null;
  const supported = roles.get(headKey(head)) ?? [];
  return (
    <ul class="plain role-list" aria-label={t("roles")}>
      {supported.map(({ role, score }) => {
        const colour = roleColour(role.name, dark);
        return (
          <li key={role.name}>
            <span class="swatch" style={{ background: colour, color: textColourOn(colour) }}>
              {text(role.label)}
            </span>{" "}
            <span class="muted">{text(score.evidence)}</span>
          </li>
        );
      })}
      {supported.length ? null : <li class="muted">{t("noRole")}</li>}
    </ul>
  );
}
