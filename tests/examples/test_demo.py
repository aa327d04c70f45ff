"""The demo runs anywhere: without a terminal, in a narrow one, without colour and without Unicode."""

from __future__ import annotations

import io
import math
import re
import runpy
import sys

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from examples.demo import app
from examples.drawing import heat_map, matrix


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    return result.output


def console(width: int = 80, *, encoding: str = "utf-8", **options) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, **options)


def drawn(drawing, on: Console) -> str:
    with on.capture() as captured:
        on.print(drawing)
    return captured.get()


def test_help_says_what_there_is():
    about = invoke("--help")
    assert "step by step" in about
    assert {"--sentence", "--head", "--seed"} <= set(re.findall(r"--\w+", about))


def test_every_matrix_of_the_worked_example_is_printed():
    shown = invoke()
    titles = ("X", "W_Q", "W_K", "W_V", "W_O", "Q = X W_Q", "K = X W_K", "V = X W_V", "Q0", "K1", "V1", "Q0 K0^T")
    titles += ("S1 = Q1 K1^T / sqrt(2)", "A0 = softmax(S0)", "H1 = A1 V1", "Concat(H0, H1)", "Concat(H0, H1) W_O")
    for title in titles:
        assert title in shown
    for row in ("2 1 1 0", "0 2 1 3", "1 1 4 4", "0 1 2 3", "1 4 1 4", "5 1 6", "1 11 13"):
        assert row in shown
    first_score, first_weight = 5 / math.sqrt(2), 1 / (2 + math.exp(1 / math.sqrt(2)))
    assert f"{first_score:.4f}" in shown
    assert f"{first_weight:.4f}" in shown
    assert "returns the same output" in shown


def test_both_sentences_are_shown_with_shapes_weights_and_kernel():
    shown = invoke()
    assert "那只动物没有过马路" in shown
    assert "The animal didn't cross the street" in shown
    assert "1 x 17 x 512" in shown
    assert "1 x 8 x 12 x 64" in shown
    assert shown.count("Kernel: ") == 2
    assert "PyTorch's fused kernels do not return weights" in shown


def test_a_sentence_of_ones_own_and_another_head():
    shown = invoke("--sentence", "[bold]多头[/bold]", "--head", "7", "--seed", "5")
    assert "[bold]多头[/bold]" in shown  # printed, not obeyed
    assert "Attention map of head 7" in shown
    assert "The animal" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sentence", " "), "a sentence needs at least one word, character or punctuation mark, got ' '"),
        (("--head", "8"), "--head must be from 0 to 7, the heads of the layer, got 8"),
        (("--head", "-1"), "--head must be from 0 to 7, the heads of the layer, got -1"),
        (("--head", "x"), "--head must be a valid integer, got 'x'; see demo --help"),
        (("--heat",), "there is no option --heat; did you mean --head or --help?"),
    ],
)
def test_a_bad_option_is_refused_in_words(arguments, words):
    result = CliRunner().invoke(app, list(arguments), prog_name="demo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"demo: {words}\n"


def test_a_pipe_without_unicode_gets_escapes_and_no_crash(monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setenv("COLUMNS", "60")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "examples.demo")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("examples.demo", run_name="__main__")
    assert not ended.value.code
    written.flush()
    shown = written.buffer.getvalue().decode("ascii")
    assert "\\u90a3" in shown  # 那
    assert "Kernel: " in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("width", [24, 40, 200])
def test_lines_fit_the_terminal(width):
    done = CliRunner().invoke(app, [], env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    assert max(map(cell_len, done.output.splitlines())) <= width
    assert "…" not in done.output


def test_no_color_leaves_no_colour_in_a_terminal_that_has_it():
    weights = torch.eye(3)
    colourful = console(force_terminal=True, color_system="truecolor", no_color=False)
    assert "48;2;255;220;60" in drawn(heat_map(weights, "abc", colourful), colourful)
    plain = console(force_terminal=True, color_system="truecolor", no_color=True)
    assert "48;2" not in drawn(heat_map(weights, "abc", plain), plain)


def test_heat_map_puts_tokens_on_both_axes_and_the_heaviest_key_brightest():
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    on = console(40)
    lines = [line.rstrip() for line in drawn(heat_map(weights, ["ab", "它", "c"], on), on).splitlines()]
    assert lines == ["   a 它c", "   b", "ab   ██", "它 ░░▒▒░░", "c      ██"]


def test_heat_map_without_unicode_uses_letters_and_places():
    on = console(40, encoding="ascii")
    shown = drawn(heat_map(torch.eye(2), ["它", "a"], on), on)
    assert shown.isascii()
    assert [line.split() for line in shown.splitlines()] == [["0", "a"], ["0", "@@"], ["a", "@@"]]


def test_heat_map_says_which_keys_a_narrow_terminal_leaves_out():
    on = console(12)
    shown = drawn(heat_map(torch.full((19, 19), 1 / 19), ["word"] * 19, on), on)
    assert "first 7 of 19 keys" in " ".join(shown.split())


def test_a_matrix_gives_up_decimal_places_before_columns():
    values = torch.tensor([[1 / 3, 12.5], [0.25, 7.0]], dtype=torch.float64)
    wide, narrow = console(40), console(14)
    assert "⎡  0.3333 12.5000 ⎤" in drawn(matrix("M", values, wide), wide)
    assert "⎡  0.3 12.5 ⎤" in drawn(matrix("M", values, narrow), narrow)
