/** The roles of a head as labels. */
import type { JSX } from "preact";
import type { Head } from "../data";
import { roleColour, textColourOn } from "../parts/colour";
import { useLocale } from "../parts/language";
import type { TableColumn } from "../parts/sortable-table";
import { useDark } from "../parts/theme";
import { useModel, type Model } from "./model";

export function RoleChips({ head }: { head: Head }): JSX.Element {
  const model = useModel();
  const { text, t } = useLocale();
  const dark = useDark();
  const roles = model.rolesOf(head);
  if (!roles.length) return <span class="muted">{t("noRole")}</span>;
  return (
    <span class="chips">
      {roles.map(({ role: name }) => {
        const role = model.role(name);
        const colour = roleColour(name, dark);
        return (
          <span class="chip" key={name} style={{ background: colour, color: textColourOn(colour) }}>
            {role ? text(role.label) : name}
          </span>
        );
      })}
    </span>
  );
}

export function rolesColumn(model: Model, label: string): TableColumn<Head> {
  const names = (head: Head) => model.rolesOf(head).map((score) => score.role);
  return { name: "roles", label, by: (head) => names(head).join(" "), show: (head) => <RoleChips head={head} /> };
}
