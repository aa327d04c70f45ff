"""Run notebooks in full and print their text: `python -m notebooks [--write] [NAME ...]`; --write stores their outputs.

A cell is run as Jupyter runs it: the last expression, what is printed and the figures are its outputs. No Jupyter is
needed, and outputs have no times or paths, so that they change only with the numbers. A cell with the metadata `short`
sets the sizes of the notebook; the tests replace them by those, and run the same code in seconds.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

from notebooks import NOTEBOOKS

FOLDER = Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))


def write(name: str, notebook: dict[str, Any]) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    (FOLDER / f"{name}.ipynb").write_text(text, "utf-8")


def run(notebook: dict[str, Any], *, short: bool = False) -> dict[str, Any]:
    """Run all cells, replace their outputs, and return the variables of the notebook."""
    plt.switch_backend("agg")
    plt.close("all")
    variables: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["execution_count"] = number
        cell["outputs"] = _outputs("".join(cell["source"]), variables, number)
        if short:
            variables |= cell["metadata"].get("short", {})
    return variables


def printed(notebook: dict[str, Any]) -> str:
    """Return the text of all outputs; figures are named by their sizes."""
    parts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            text = "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])
            parts.append(text.removesuffix("\n"))
    return "".join(f"{part}\n" for part in parts)


def _outputs(source: str, variables: dict[str, Any], number: int) -> list[dict[str, Any]]:
    body = ast.parse(source)
    shown = body.body and isinstance(body.body[-1], ast.Expr) and not source.rstrip().endswith(";")
    last = body.body.pop() if shown else None
    stream, value = io.StringIO(), None
    with redirect_stdout(stream):
        exec(compile(body, f"<cell {number}>", "exec"), variables)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), variables)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if stream.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(stream.getvalue())})
    for figure in map(plt.figure, plt.get_fignums()):
        data = {"image/png": base64.b64encode(_png(figure)).decode(), "text/plain": [repr(figure)]}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        outputs.append({"output_type": "execute_result", "metadata": {}, "execution_count": number, "data": data})
    return outputs


def _png(figure: Figure) -> bytes:
    """Return a figure in 128 colours, which is a third of the size."""
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=100, bbox_inches="tight")
    Image.open(full).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(*arguments: str) -> None:
    names = [argument for argument in arguments if argument != "--write"] or NOTEBOOKS
    for name in names:
        notebook = read(name)
        run(notebook)
        print(printed(notebook), end="", flush=True)
        if "--write" in arguments:
            write(name, notebook)


if __name__ == "__main__":
    main(*sys.argv[1:])
