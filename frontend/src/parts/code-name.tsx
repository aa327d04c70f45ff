/** A label with its name in files and commands, wherever the two differ. */
import type { ComponentChildren, JSX } from "preact";

interface CodeNameProps {
  label: string;
  name: string;
  /** Content after the label, before the name. */
  children?: ComponentChildren;
}

export function CodeName({ label, name, children }: CodeNameProps): JSX.Element {
  if (label === name) {
    return (
      <>
        {label}
        {children}
      </>
    );
  }
  return (
    <>
      {label}
      {children}{" "}
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
