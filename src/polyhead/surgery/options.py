"""Options of edits, checked without a model and without PyTorch: the command line refuses bad ones at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from polyhead.errors import OptionError

CRITERIA = ("compensated", "plain", "ablation", "gradient", "taylor", "magnitude", "redundancy", "random")
METRICS = ("perplexity", "fidelity")
Grouping = Literal["similar", "neighbours"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
Form = Literal["uniform", "uneven", "padded"]  # of a saved model
FORMS: tuple[Form, ...] = get_args(Form)
OTHER_FORMS = (
    "use --form padded (loads anywhere, saves nothing) or --form uneven (smaller, loads with polyhead.load); form= "
    "in Python"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A budget: the share of heads to prune, or the factor by which to shrink the KV cache or the FLOPs.

    >>> Target.parse("30%-heads"), Target.parse("1.2x-faster")
    (Target(kind='heads', amount=0.3), Target(kind='faster', amount=1.2))
    """

    kind: Literal["heads", "cache", "faster"]
    amount: float

    @classmethod
    def parse(cls, text: str) -> Target:
        share = re.fullmatch(r"(\d+(?:\.\d+)?)%-heads", text.strip())
        times = re.fullmatch(r"(\d+(?:\.\d+)?)x-(cache|faster)", text.strip())
        if share is not None and 0 < float(share[1]) < 100:
            return cls("heads", float(share[1]) / 100)
        if times is not None and float(times[1]) > 1:
            return cls(times[2], float(times[1]))  # type: ignore[arg-type]
        raise OptionError(
            "a target must be a share of heads to prune (30%-heads), a factor of KV cache (2x-cache) or a factor of "
            f"FLOPs (1.2x-faster), got {text!r}"
        )

    def __str__(self) -> str:
        if self.kind == "heads":
            return f"{100 * self.amount:g}% fewer heads"
        return f"{self.amount:g} times " + ("less cache" if self.kind == "cache" else "fewer FLOPs")


def check_criterion(criterion: str) -> None:
    """Raise if there is no such criterion."""
    if criterion not in CRITERIA:
        raise OptionError(f"criterion must be one of {', '.join(CRITERIA)}, got {criterion!r}")


def check_form(form: str) -> None:
    """Raise if models are not saved in such a form."""
    if form not in FORMS:
        raise OptionError(f"form must be one of {', '.join(FORMS)}, got {form!r}")


def check_selection(form: str, criterion: str, *, by_name: bool = False, seed: int = 0) -> None:
    """Raise if there is no such form or criterion, the criterion does not select heads for the form, or none is used.

    Heads that are passed `by_name` are not selected, and `seed` is that of the criterion `random`.
    """
    check_form(form)
    check_criterion(criterion)
    if by_name and criterion != "compensated":
        raise OptionError(f"a criterion selects the heads of a share, got {criterion!r} and heads by name; omit it")
    if seed and criterion != "random":
        raise OptionError(f"seed is that of the criterion 'random', got seed {seed} with {criterion!r}; omit it")
    if form == "uniform" and criterion != "compensated":
        raise OptionError(
            f"the uniform form needs the criterion compensated, got {criterion!r}; omit the criterion, or {OTHER_FORMS}"
        )


def check_grouping(grouping: str) -> None:
    """Raise if KV heads cannot be grouped so."""
    if grouping not in GROUPINGS:
        raise OptionError(f"grouping must be one of {', '.join(GROUPINGS)}, got {grouping!r}")


def check_conversion(kv_heads: int, grouping: str, rounds: int) -> None:
    """Raise on invalid options of `polyhead.convert`."""
    if kv_heads < 1:
        raise OptionError(f"kv_heads must be greater than 0, got {kv_heads}")
    if rounds < 0:
        raise OptionError(f"rounds must be at least 0, got {rounds}")
    check_grouping(grouping)


def check_shrinking(
    target: Target, *, has_text: bool, metric: str | None, criterion: str, form: str, measured: bool, search: bool
) -> None:
    """Raise on invalid options of `polyhead.shrink` and on options that exclude each other."""
    if not has_text:
        raise OptionError(
            "text is required: text like the model's inputs for calibration and testing, got none; use 20,000 tokens "
            "or more in .txt, .md, .jsonl or .parquet files, a folder of them, or - for standard input"
        )
    if metric is not None and metric not in METRICS:
        raise OptionError(f"metric must be {' or '.join(METRICS)}, got {metric!r}")
    if measured and target.kind != "faster":
        raise OptionError(f"a measured target must be a speed, such as 1.2x-faster, got {target}")
    if search and measured:
        raise OptionError("search needs a target that is counted, got a measured one as well; omit one of them")
    check_selection(form, criterion)
