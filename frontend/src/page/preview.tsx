/** Preview of the head under the pointer, beside the grid. */
import type { JSX, RefObject } from "preact";
import { useState } from "preact/hooks";
import { hasNaN, type Column } from "../data";
import { headOf } from "../parts/head-name";
import { HeatMap } from "../parts/heat-map";
import { useLocale } from "../parts/language";
import { RampLegend } from "../parts/legend";
import { useDark } from "../parts/theme";
import { Line } from "../parts/tokens";
import { ColumnName } from "./column-name";
import { keyOf, useModel, withUnit } from "./model";
import { RoleChips } from "./role-chips";
import { mapOf } from "./stack-grid";

const STATISTICS = ["entropy", "mean_distance", "confidence", "sink_mass", "output_norm_share"];

interface PreviewProps {
  /** Set to the function that changes the shown head, so that hovering redraws only the preview. */
  hover: RefObject<((key: string) => void) | null>;
  column: Column | undefined;
}

/** Starts with the head of the first finding. Hidden from screen readers: the name of each cell says the same. */
export function Preview({ hover, column }: PreviewProps): JSX.Element {
  const model = useModel();
  const locale = useLocale();
  const dark = useDark();
  const first = model.page.findings.find((finding) => finding.heads.length)?.heads[0];
  const [hovered, setHovered] = useState(first ? keyOf(first) : "");
  hover.current = setHovered;
  const id = headOf(hovered);
  const head = model.head(id);
  const hint = <p class="muted">{locale.t("previewHint")}</p>;
  if (!head) {
    return (
      <aside class="preview" aria-hidden="true">
        {hint}
      </aside>
    );
  }
  const map = mapOf(model, id, dark);
  const shown = [column, ...STATISTICS.map((name) => model.column(name))].filter((one) => one !== undefined);
  const [role] = model.rolesOf(head);
  return (
    <aside class="preview" aria-hidden="true">
      <h3>{model.fullName(id, locale)}</h3>
      <RoleChips head={head} />
      {role ? (
        <p class="evidence">
          <Line text={locale.text(role.evidence)} />
        </p>
      ) : null}
      {map ? (
        <>
          <HeatMap {...map.heat} scale={map.scale} label="" />
          <RampLegend
            scale={map.scale}
            format={(x) => locale.number(x, "share")}
            {...(hasNaN(map.heat.values) ? { missing: locale.t("notANumber") } : {})}
          />
        </>
      ) : null}
      <dl>
        {[...new Set(shown)].slice(0, 5).map((one) => (
          <div>
            <dt>
              <ColumnName column={one} />
            </dt>
            <dd>{withUnit(model.value(head, one.name), one.format, locale)}</dd>
          </div>
        ))}
      </dl>
      {hint}
    </aside>
  );
}
