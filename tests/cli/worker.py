"""`polyhead` as a process of torchrun that is killed or has other options, by variables of the tests."""

from __future__ import annotations

import os
import signal
import sys

from polyhead.cli import main

if __name__ == "__main__":
    if os.environ["RANK"] == os.environ.get("KILLED_RANK"):
        from polyhead.inspection.text_pass import TextPass

        keep, saved = TextPass.keep, []

        def keep_and_die(*arguments: object) -> None:
            keep(*arguments)  # type: ignore[arg-type]
            saved.append(arguments)
            if len(saved) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        TextPass.keep = keep_and_die  # type: ignore[method-assign,assignment]
    if os.environ["RANK"] == os.environ.get("OTHER_RANK"):
        sys.argv += os.environ["OTHER_OPTIONS"].split()
    main()
