/** A label with its name in files and commands, wherever the two differ. */
import type { JSX } from "preact";

export function CodeName({ label, name }: { label: string; name: string }): JSX.Element {
  if (label === name) return <>{label}</>;
  return (
    <>
      {label}{" "}
      <code class="code-name">
        {name.split("_").map((part, i) => (
          <>
            {i ? (
              <>
                _<wbr />
              </>
            ) : null}
            {part}
          </>
        ))}
      </code>
    </>
  );
}

/** The same as plain text, for options and files. */
export function withCodeName(label: string, name: string): string {
  return label === name ? label : `${label} · ${name}`;
}
