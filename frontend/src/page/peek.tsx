/** A glance at the head under the pointer, beside the grid. */
import type { JSX, RefObject } from "preact";
import { useState } from "preact/hooks";
import type { Column, Place } from "../data";
import { HeatMap } from "../parts/heat-map";
import { useWords } from "../parts/language";
import { useDark } from "../parts/theme";
import { Line } from "../parts/tokens";
import { keyOf, useModel, withUnit } from "./model";
import { RoleChips } from "./role-chips";
import { mapOf } from "./stack-grid";

const GLANCED = ["entropy", "mean_distance", "confidence", "sink_mass", "output_norm_share"];

interface PeekProps {
  /** Is handed the way to tell the glance where to look, so that pointing redraws nothing but the glance. */
  point: RefObject<((key: string) => void) | null>;
  column: Column | undefined;
}

/** Starts with the head of the first finding. Hidden from screen readers: each cell's own name says the same. */
export function Peek({ point, column }: PeekProps): JSX.Element {
  const model = useModel();
  const words = useWords();
  const dark = useDark();
  const told = model.page.findings.find((finding) => finding.heads.length)?.heads[0];
  const [pointed, setPointed] = useState(told ? keyOf(told) : "");
  point.current = setPointed;
  const place = pointed ? (pointed.split(".").map(Number) as Place) : undefined;
  const head = place && model.head(place);
  if (!place || !head) {
    return (
      <aside class="peek" aria-hidden="true">
        <p class="muted">{words.say("peekHint")}</p>
      </aside>
    );
  }
  const map = mapOf(model, place, dark);
  const shown = [column, ...GLANCED.map((name) => model.column(name))].filter((one) => one !== undefined);
  const [evidence] = model.held(head);
  return (
    <aside class="peek" aria-hidden="true">
      <h3>{model.long(place, words)}</h3>
      <RoleChips head={head} />
      {evidence ? (
        <p class="evidence">
          <Line text={words.text(evidence.evidence)} />
        </p>
      ) : null}
      {map ? <HeatMap {...map.heat} scale={map.scale} label="" /> : null}
      <dl>
        {[...new Set(shown)].slice(0, 5).map((one) => (
          <div>
            <dt>{words.text(one.label)}</dt>
            <dd>{withUnit(head.values[one.name], one.format, words)}</dd>
          </div>
        ))}
      </dl>
      <p class="muted">{words.say("peekHint")}</p>
    </aside>
  );
}
