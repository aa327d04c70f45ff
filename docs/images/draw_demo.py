"""Draws demo.svg, the picture in the README, from what `polyhead demo` shows: python docs/images/draw_demo.py"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from polyhead.cli.demo import _show_sentence
from polyhead.lab import sentence as lab


def main() -> None:
    console = Console(record=True, width=84, highlight=False, force_terminal=True, file=io.StringIO())
    _show_sentence(lab.trace(lab.SENTENCES[1], seed=0), 0, console)
    drawing = console.export_svg(title="polyhead demo", theme=MONOKAI, unique_id="demo")
    # The picture is to work offline: the reader's own monospaced font in place of one from the network.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    drawing = drawing.replace("font-family: Fira Code, monospace", "font-family: monospace")
    (Path(__file__).parent / "demo.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
