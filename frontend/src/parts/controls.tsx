/** Controls that the page and the viewer share. */
import type { ComponentChildren, JSX } from "preact";

interface SegmentsProps<Value> {
  label: string;
  options: readonly (readonly [value: Value, content: ComponentChildren])[];
  value: Value;
  onChange: (value: Value) => void;
}

/** Buttons of which one is pressed. */
export function Segments<Value>({ label, options, value, onChange }: SegmentsProps<Value>): JSX.Element {
  return (
    <span class="segments" role="group" aria-label={label}>
      {options.map(([option, content]) => (
        <button type="button" aria-pressed={option === value} onClick={() => onChange(option)}>
          {content}
        </button>
      ))}
    </span>
  );
}

interface SelectProps {
  label: string;
  value: string | number;
  onChange: (value: string) => void;
  children: ComponentChildren;
}

export function Select({ label, value, onChange, children }: SelectProps): JSX.Element {
  return (
    <label>
      {label}{" "}
      <select aria-label={label} value={String(value)} onChange={(event) => onChange(event.currentTarget.value)}>
        {children}
      </select>
    </label>
  );
}

/** A region that scrolls sideways, also by keyboard. */
export function TableRegion({ label, children }: { label: string; children: ComponentChildren }): JSX.Element {
  return (
    <div class="table-scroll" tabIndex={0} role="region" aria-label={label}>
      {children}
    </div>
  );
}
