"""Draws docs/images/inspect.svg, the picture in the README, from an inspection that was kept.

polyhead inspect --save FOLDER
python docs/draw_inspect.py FOLDER
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from polyhead.cli.inspect import show
from polyhead.inspection import load_inspection

WIDTH = 106  # columns; the longest line of the default run


def draw(folder: Path) -> str:
    console = Console(record=True, width=WIDTH, highlight=False, force_terminal=True, file=io.StringIO())
    show(load_inspection(folder), console)
    console.print()  # the frame cuts into the last line
    drawing = console.export_svg(title="polyhead inspect", theme=MONOKAI, unique_id="inspect")
    # The picture is to work offline: the reader's own monospaced font in place of one from the network.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    return drawing.replace("font-family: Fira Code, monospace", "font-family: monospace")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"python docs/draw_inspect.py FOLDER, got {len(sys.argv) - 1} arguments")
    picture = Path(__file__).parent / "images" / "inspect.svg"
    picture.write_text(draw(Path(sys.argv[1])), encoding="utf-8")


if __name__ == "__main__":
    main()
