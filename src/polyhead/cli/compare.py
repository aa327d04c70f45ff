"""`polyhead compare`: differences between two inspections."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyhead.cli.options import optional
from polyhead.cli.terminal import plain_console, plain_table, say
from polyhead.errors import OptionError

if TYPE_CHECKING:
    from polyhead.inspection import Inspection
    from polyhead.inspection.comparison import Comparison
    from polyhead.inspection.heads import Head

UNTESTED_ROWS, LARGE_CHANGE = 5, 0.1  # number and minimum relative change of shown values without an error estimate
NAMED = 8  # at most so many heads with NaN are listed


def compare(
    before: Annotated[
        Path,
        typer.Argument(
            metavar="A", help="Run folder written by `polyhead inspect --save`, or RUN@STEP, a step of a training run."
        ),
    ],
    after: Annotated[
        Path,
        typer.Argument(metavar="B", help="Another run folder, e.g. after training, after pruning, on another text."),
    ],
    most: Annotated[int, typer.Option(metavar="N", help="Maximum number of differences to show.")] = 20,
    statistic: Annotated[str | None, optional("Show only differences in this column.", metavar="NAME")] = None,
) -> None:
    """Compare two inspections, or two steps of training, head by head.

    For models before and after training or pruning, two models of one layout, or two texts. Heads of edited models are
    matched by their number in the original: L0H5 → L0H4 is L0H5 of A and L0H4 of B. Runs over the same text are
    compared document by document, or by context if there are few documents. Two different texts are independent
    samples and must share no documents. Only differences beyond sampling error are shown: more than 1% of the value,
    and at most 5% of them expected by chance (false discovery rate over all tests); of values computed from the weights
    alone, any difference. Columns without an error estimate (output norms) are not tested: up to five of their largest
    relative changes above 10% follow, and --statistic NAME shows all values of one.

    RUN@STEP is a step that `polyhead.training.RunDirectory` wrote. Differences of two steps are tested against the
    noise of the steps around each.
    """
    from polyhead.inspection.run_files import check_saved

    console = plain_console()
    if most < 1:
        raise OptionError(f"--most must be at least 1, got {most}")
    for run in (before, after):
        if _step_of(run) is None:
            check_saved(run)

    from polyhead.inspection import compare as compared
    from polyhead.inspection.comparison import FALSE_DISCOVERIES, MIN_CHANGE, OF_LAYER, same_chance
    from polyhead.inspection.heads import has_stacks, named
    from polyhead.inspection.wording import loss_in_words

    first, second = _load(before), _load(after)
    comparison = compared(first, second)
    names = {change.name for change in (*comparison.changes, *comparison.undefined)}
    stacked = has_stacks((*first.table.sites, *second.table.sites))
    if statistic is not None and statistic not in names:
        raise OptionError(
            f"--statistic must be a column of both inspections, {', '.join(sorted(names))}; got {statistic!r}"
        )
    for label, folder, inspection in (("A", before, first), ("B", after, second)):
        is_cut = inspection.facts.get("interrupted") and not inspection.facts.get("read")
        stopped = ", interrupted before the end of the text" if is_cut else ""
        size = f" ({inspection.facts['model']}), {inspection.facts['tokens']:,} tokens{stopped}"
        if "step" in inspection.facts:
            size = f", loss {inspection.facts['step_loss']:.4g}"
        console.print(f"{label}  {folder}{size}", markup=False, soft_wrap=not console.is_terminal)
    significant, untested = comparison.significant(statistic), comparison.untested(statistic)
    tested, exact = comparison.tested(statistic), comparison.exact(statistic)
    console.print(
        f"{sum(x.q <= FALSE_DISCOVERIES for x in tested)} of {len(tested)} tested values differ at a false discovery "
        f"rate of {FALSE_DISCOVERIES:.0%}, {sum(x.significant for x in tested)} of them by more than {MIN_CHANGE:.0%}:"
    )
    by_column = Counter({x.name: 0 for x in tested})
    by_column.update(x.name for x in tested if x.significant)
    columns = ", ".join(f"{name} {number}" for name, number in by_column.most_common())
    console.print(columns or "-", soft_wrap=not console.is_terminal)
    if changed := sum(x.significant for x in exact):
        columns = ", ".join(sorted({x.name for x in exact}))
        console.print(f"{changed} of {len(exact)} values computed from the weights alone ({columns}) differ")
    heads = {change.head for change in comparison.changes}
    console.print(f"{len({x.head for x in significant})} of {len(heads)} common heads changed")
    console.print(_sampling(comparison), style="dim")
    if comparison.loss is not None:
        loss, over = comparison.loss, first.facts.get("intervals_over", "documents")
        sampling = f"paired over {loss.samples[0]} {over}" if loss.paired else "independent samples"
        console.print(
            f"{loss_in_words(first.facts['loss']).en} {loss.before:.4g} in A, {loss.after:.4g} in B, difference "
            f"{loss.difference:+.3g} nats, standard error {loss.error:.2g} ({sampling})"
        )
    for label, values in (("A", "before"), ("B", "after")):
        missing = [x for x in comparison.undefined if math.isnan(getattr(x, values)) and statistic in (None, x.name)]
        if missing:
            columns = ", ".join(sorted({x.name for x in missing}))
            places = list(dict.fromkeys(_in_both(x.head, x.head_after, stacked=stacked) for x in missing))
            more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
            say(
                console,
                f"{len(missing)} values not compared, since they are NaN in {label} only: {columns} of "
                f"{', '.join(places[:NAMED])}{more}",
                "yellow",
            )
    for label, only in (("A", comparison.only_before), ("B", comparison.only_after)):
        if len(only):
            say(console, f"only in {label}: {', '.join(map(str, only))}")
    if comparison.losses[0] != comparison.losses[1] and None not in comparison.losses:
        console.print(
            f"importance is not compared: its loss is {comparison.losses[0]} in A, {comparison.losses[1]} in B",
            style="dim",
        )
    large = (
        untested if statistic is not None else tuple(x for x in untested if x.relative > LARGE_CHANGE)[:UNTESTED_ROWS]
    )
    for shown, skipped in ((significant, ()), (large, untested)):
        if len(skipped):
            columns = ", ".join(sorted({x.name for x in skipped}))
            listed = "; largest relative changes:" if large else ""
            console.print(f"{len(skipped)} values of {columns} are not tested: no error estimate{listed}", style="dim")
        if not len(shown):
            continue
        table = plain_table(["head", "column"], ["A", "B", "difference", "standard errors"])
        for change in shown[:most]:
            errors = "not tested" if math.isnan(change.error) else "exact"
            errors = f"{abs(change.difference) / change.error:.1f}" if change.error > 0 else errors
            place = _in_both(change.head, change.head_after, stacked=stacked)
            stack_prefix = named(change.head, stacked=stacked).removesuffix(named(change.head))
            table.add_row(
                f"{stack_prefix}layer {change.head[0].layer}" if change.name in OF_LAYER else place,
                _with_unit(change.name, first.facts.get("loss")),
                f"{change.before:.4g}",
                f"{change.after:.4g}",
                f"{change.difference:+.4g}",
                errors,
            )
        console.print(table)
        if len(shown) > most:
            console.print(f"… and {len(shown) - most} more; show them with --most")
    if not same_chance(first, second):
        with_chance, without = "AB" if first.facts["chance"] else "BA"
        console.print(
            f"roles are not compared: their thresholds allow for a model with random weights in {with_chance}, "
            f"not in {without} (--no-chance)",
            style="dim",
        )
    for word, roles in (("gained", comparison.gained), ("lost", comparison.lost)):
        for head, role in roles:
            console.print(f"{named(head, stacked=stacked)} {word} the role {role}", markup=False)


def _step_of(run: Path) -> tuple[Path, int] | None:
    """Return folder and step of RUN@STEP, or None for another folder."""
    folder, at, step = str(run).rpartition("@")
    if run.exists() or not at:
        return None
    if not step.isdecimal():
        raise OptionError(f"a step of a training run is RUN@STEP with a number, got {run}")
    return Path(folder), int(step)


def _load(run: Path) -> Inspection:
    from polyhead.inspection import load_inspection

    if (place := _step_of(run)) is None:
        return load_inspection(run)

    from polyhead.training import inspect_step, load_run

    folder, step = place
    return inspect_step(load_run(folder), step, folder.name)


def _sampling(comparison: Comparison) -> str:
    (one, two), (over, over_after) = comparison.samples, comparison.over
    if over == over_after == "pairs of steps":
        few = ": too few for a reliable test, which needs 10 in each" if min(one, two) < 10 else ""
        return f"noise of a step from {one} pairs of neighbouring steps in A, {two} in B{few}"
    if comparison.paired:
        return f"paired tests over the {one} {over} of the same text"
    note = ", one in eight tokens counts as independent" if "tokens" in comparison.over else ""
    note += "; assumes that the texts share no documents"
    return f"tests of independent samples: {one:,} {over} in A, {two:,} {over_after} in B{note}"


def _with_unit(name: str, loss: str | None) -> str:
    from polyhead.inspection.vocabulary import column_of

    unit = column_of(name, loss).unit.en
    return f"{name}, {unit}" if unit else name


def _in_both(before: Head, after: Head, *, stacked: bool) -> str:
    from polyhead.inspection.heads import named

    name = named(before, stacked=stacked)
    return name if named(before) == named(after) else f"{name} → {named(after)}"
