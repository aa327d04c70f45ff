"""`python -m examples.demo`: multi-head attention step by step, on a tiny example and then on sentences."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from polyhead.cli.errors import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from examples.sentence import SentenceTrace
    from polyhead.ops.attention import Explanation


class SingleCommand(TyperCommand):
    """Program of one command whose errors are one line, as those of `polyhead`."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with one_line(lambda: info_name or "", tuple(args)):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with one_line(lambda: ctx.command_path, ()):
            return super().invoke(ctx)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=SingleCommand)
def demo(
    sentence: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Use this sentence instead of the two built-in ones; repeatable."),
    ] = None,
    head: Annotated[int, typer.Option(metavar="N", help="Head whose attention map is drawn, 0 to 7.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the weights of the untrained layer.")] = 0,
) -> None:
    """Show multi-head attention step by step.

    First prints every matrix of an example with 3 tokens, d_model 4 and 2 heads. Then runs a layer with d_model 512 and
    8 heads on a Chinese and an English sentence, and shows one head's attention map and the kernel that ran.
    """
    from rich.console import Console

    from examples import sentence as lab
    from polyhead.errors import OptionError

    console = Console(highlight=False)
    if not 0 <= head < lab.NUM_HEADS:
        raise OptionError(f"--head must be from 0 to {lab.NUM_HEADS - 1}, the heads of the layer, got {head}")
    traces = [lab.trace(text, seed=seed) for text in sentence or lab.SENTENCES]
    _show_worked_example(console)
    for trace in traces:
        _show_sentence(trace, head, console)


def _show_worked_example(console: Console) -> None:
    from examples.drawing import HEAD_STYLES, matrix, side_by_side
    from examples.worked_example import work_through

    example = work_through()

    def show(*named: tuple[str, Tensor], styles: tuple[str, ...] = HEAD_STYLES) -> None:
        console.print(side_by_side(*(matrix(title, values, console, styles=styles) for title, values in named)))

    def show_heads(*named: tuple[str, Tensor]) -> None:
        """Print one line per head in the head's colour; {0} in a title is replaced by its number."""
        for head, style in enumerate(HEAD_STYLES):
            show(*((title.format(head), values[head]) for title, values in named), styles=(style,))

    _heading("Multi-head attention by hand: 3 tokens, d_model 4, 2 heads", console)
    _step(1, "The tokens, one per row, and the four weight matrices", console)
    show(("X", example.tokens), styles=("",))
    show(("W_Q", example.query_weight), ("W_K", example.key_weight), ("W_V", example.value_weight))
    show(("W_O", example.output_weight), styles=("",))
    _step(2, "Project: every token becomes a query, a key and a value", console)
    show(("Q = X W_Q", example.queries), ("K = X W_K", example.keys), ("V = X W_V", example.values))
    _step(3, "Split: head 0 takes columns 0-1, head 1 columns 2-3", console)
    show_heads(("Q{0}", example.head_queries), ("K{0}", example.head_keys), ("V{0}", example.head_values))
    _step(4, "Score: each query against each key, divided by sqrt(d_k) = sqrt(2)", console)
    show_heads(("Q{0} K{0}^T", example.products), ("S{0} = Q{0} K{0}^T / sqrt(2)", example.scores))
    _step(5, "Softmax: each row becomes weights that sum to one", console)
    show_heads(("A{0} = softmax(S{0})", example.weights))
    _step(6, "Weighted sum: each head's output is its weights times its values", console)
    show_heads(("H{0} = A{0} V{0}", example.head_outputs))
    _step(7, "Concatenate the heads, and project with W_O", console)
    show(("Concat(H0, H1)", example.concatenated))
    show(("Concat(H0, H1) W_O", example.output), styles=("",))
    console.print(
        f"\npolyhead.MultiHeadAttention with these weights (backend {example.backend}) returns the same output: "
        f"the maximum difference is {example.largest_difference:.1e}."
    )


def _show_sentence(trace: SentenceTrace, head: int, console: Console) -> None:
    from examples.drawing import heat_map
    from polyhead.cli.plan_table import labelled

    heads, width = trace.queries.shape[1], trace.output.shape[-1]
    _heading(f"A sentence through one layer: d_model {width}, {heads} heads", console)
    steps = (
        ("sentence", trace.text),
        ("tokens", " ".join(trace.tokens)),
        ("ids", " ".join(str(i) for i in trace.ids[0].tolist()) + f"  (vocabulary of {len(trace.vocabulary)})"),
        ("embedding", f"{_shape(trace.embedded)}  [batch, tokens, d_model]"),
        ("+ position", f"{_shape(trace.positioned)}  sinusoidal"),
        ("Q, K, V", f"{_shape(trace.queries)}  [batch, heads, tokens, d_k]"),
        ("weights", f"{_shape(trace.weights)}  [batch, heads, queries, keys]"),
        ("output", f"{_shape(trace.output)}  [batch, tokens, d_model]"),
    )
    console.print(labelled([(name, value, "") for name, value in steps]))
    console.print(
        f"\n[bold]Attention map of head {head}[/bold]: queries down, keys across. The layer is untrained, so the "
        "pattern has no meaning."
    )
    console.print(heat_map(trace.weights[0, head], trace.tokens, console))
    console.print(f"\n[bold]Kernel[/bold]: {trace.explanation.kernel} (backend {trace.backend})")
    console.print(labelled(_reasons(trace.explanation)))
    console.print(f"Kernel for the map, which needs the attention weights: {trace.weights_explanation.kernel}")
    console.print(labelled(_reasons(trace.weights_explanation)))


def _reasons(explanation: Explanation) -> list[tuple[str, str, str]]:
    """Return one line per backend: its name, its reason, and the style of the line."""
    lines = []
    for choice in explanation.choices:
        is_chosen = choice.backend == explanation.chosen
        if not choice.supported:
            reason = "unsupported: " + "; ".join(choice.reasons)
        elif is_chosen:
            reason = f"{choice.kernel}: the first supported backend in the order of `auto`"
        else:
            reason = f"{choice.kernel}: " + (choice.avoided or "supported, but later in the order of `auto`")
        lines.append((("-> " if is_chosen else "   ") + choice.backend, reason, "green" if is_chosen else "dim"))
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
    app(prog_name="python -m examples.demo")
