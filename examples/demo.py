"""`python -m examples.demo`: multi-head attention step by step, on paper-sized numbers and then on real sentences."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from examples.sentence import SentenceTrace
    from polyhead.ops.attention import Explanation


def demo(
    sentence: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A sentence of your own instead of the two; may be given several times."),
    ] = None,
    head: Annotated[int, typer.Option(help="Which of the 8 heads' weights to draw, counted from 0.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the untrained layer's weights.")] = 0,
) -> None:
    """Work through multi-head attention step by step.

    First three tokens, four channels and two heads, every matrix printed. Then a layer of 512 channels and 8 heads on
    a sentence in Chinese and one in English, from tokens to attention, with a map of one head's weights and the kernel
    that ran.
    """
    from rich.console import Console

    from examples import sentence as lab
    from polyhead.errors import OptionError

    console = Console(highlight=False)
    if not 0 <= head < lab.NUM_HEADS:
        raise typer.BadParameter(f"the layer has heads 0 to {lab.NUM_HEADS - 1}, got {head}", param_hint="--head")
    try:
        traces = [lab.trace(text, seed=seed) for text in sentence or lab.SENTENCES]
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint="--sentence") from None
    _show_worked_example(console)
    for seen in traces:
        _show_sentence(seen, head, console)


def _show_worked_example(console: Console) -> None:
    from examples.worked_example import work_through
    from polyhead.cli.drawing import HEAD_STYLES, matrix, side_by_side

    example = work_through()

    def show(*named: tuple[str, Tensor], styles: tuple[str, ...] = HEAD_STYLES) -> None:
        console.print(side_by_side(*(matrix(title, values, console, styles=styles) for title, values in named)))

    def show_heads(*named: tuple[str, Tensor]) -> None:
        """A line a head, in the head's colour; {0} in a title becomes its number."""
        for head, style in enumerate(HEAD_STYLES):
            show(*((title.format(head + 1), values[head]) for title, values in named), styles=(style,))

    _heading("Multi-head attention by hand: 3 tokens, d_model 4, 2 heads", console)
    _step(1, "The tokens, one a row, and the four weight matrices", console)
    show(("X", example.tokens), styles=("",))
    show(("W_Q", example.query_weight), ("W_K", example.key_weight), ("W_V", example.value_weight))
    show(("W_O", example.output_weight), styles=("",))
    _step(2, "Project: every token becomes a query, a key and a value", console)
    show(("Q = X W_Q", example.queries), ("K = X W_K", example.keys), ("V = X W_V", example.values))
    _step(3, "Split: head 1 takes columns 0-1, head 2 columns 2-3", console)
    show_heads(("Q{0}", example.head_queries), ("K{0}", example.head_keys), ("V{0}", example.head_values))
    _step(4, "Score: each query against each key, divided by sqrt(d_k) = sqrt(2)", console)
    show_heads(("Q{0} K{0}^T", example.products), ("S{0} = Q{0} K{0}^T / sqrt(2)", example.scores))
    _step(5, "Softmax: each row becomes weights that sum to one", console)
    show_heads(("A{0} = softmax(S{0})", example.weights))
    _step(6, "Mix: each head's output is its weights times its values", console)
    show_heads(("H{0} = A{0} V{0}", example.head_outputs))
    _step(7, "Concatenate the heads, and mix them with W_O", console)
    show(("Concat(H1, H2)", example.concatenated))
    show(("Concat(H1, H2) W_O", example.output), styles=("",))
    console.print(
        f"\npolyhead.MultiHeadAttention with these weights (backend {example.backend}) gives the same output: "
        f"the largest difference is {example.largest_difference:.1e}."
    )


def _show_sentence(seen: SentenceTrace, head: int, console: Console) -> None:
    from polyhead.cli.drawing import heat_map, labelled

    heads, width = seen.queries.shape[1], seen.output.shape[-1]
    _heading(f"A sentence through one layer: d_model {width}, {heads} heads", console)
    steps = (
        ("sentence", seen.text),
        ("tokens", " ".join(seen.tokens)),
        ("ids", " ".join(str(i) for i in seen.ids[0].tolist()) + f"  (of a vocabulary of {len(seen.vocabulary)})"),
        ("embedding", f"{_shape(seen.embedded)}  [batch, tokens, d_model]"),
        ("+ position", f"{_shape(seen.positioned)}  sinusoidal"),
        ("Q, K, V", f"{_shape(seen.queries)}  [batch, heads, tokens, d_k]"),
        ("weights", f"{_shape(seen.weights)}  [batch, heads, queries, keys]"),
        ("output", f"{_shape(seen.output)}  [batch, tokens, d_model]"),
    )
    console.print(labelled([(name, what, "") for name, what in steps]))
    console.print(
        f"\n[bold]Weights of head {head}[/bold]: queries down, keys across. The layer is untrained, so the pattern "
        "shows the machinery and no grammar."
    )
    console.print(heat_map(seen.weights[0, head], seen.tokens, console))
    console.print(f"\n[bold]Which kernel ran[/bold]: {seen.explanation.kernel} (backend {seen.backend})")
    console.print(labelled(_reasons(seen.explanation)))
    console.print(f"For the map, which needs the weights themselves: {seen.weights_explanation.kernel}")
    console.print(labelled(_reasons(seen.weights_explanation)))


def _reasons(explanation: Explanation) -> list[tuple[str, str, str]]:
    """A line a backend: its name, what it says, and the style of the line."""
    lines = []
    for choice in explanation.choices:
        taken = choice.backend == explanation.chosen
        if not choice.supported:
            said = "cannot: " + "; ".join(choice.reasons)
        elif taken:
            said = f"{choice.kernel}: the first in the order of `auto` that can serve"
        else:
            said = f"{choice.kernel}: " + (choice.avoided or "could serve too, and stands later in the order")
        lines.append((("-> " if taken else "   ") + choice.backend, said, "green" if taken else "dim"))
    return lines


def _shape(tensor: Tensor) -> str:
    return " x ".join(str(size) for size in tensor.shape)


def _heading(text: str, console: Console) -> None:
    from rich.rule import Rule
    from rich.text import Text

    console.print()
    console.print(Text(text, style="bold"))
    console.print(Rule())


def _step(number: int, text: str, console: Console) -> None:
    from rich.text import Text

    console.print()
    console.print(Text.assemble((f"{number}. ", "bold yellow"), text))


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a pipe may have an encoding without Chinese characters
    typer.run(demo)
