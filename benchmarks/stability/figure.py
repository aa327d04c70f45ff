"""Figure of the stability benchmark: loss and largest logit of each contender over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.stability.tables import clip_results, settings_of
from benchmarks.stability.trials import Result, verdict

COLORS = {"plain": "#b45309", "QK-clip": "#0b7fd5", "QK-norm": "#15803d", "lower": "#616e7c"}


def panels(results: Sequence[Result]) -> list[tuple[str, list[tuple[str, str, Result]]]]:
    """Return the panels of the figure: a title, and the curves by label and color.

    One panel for each setting and learning rate at which the plain run diverged, with the remedies and the plain run at
    the next lower learning rate; a setting without such a run has one panel with its plain runs.
    """
    found = []
    for setting in settings_of(results):
        own = clip_results([x for x in results if x.trial.setting == setting])
        plain = [x for x in own if x.trial.contender == "plain"]
        diverged = [x for x in plain if verdict(x, own).diverged]
        note = f", W_Q and W_K times {setting.qk_rate_factor:g}" if setting.qk_rate_factor != 1 else ""
        note = f"{', Muon' if setting.optimizer == 'muon' else ''}{note}"
        if not diverged:
            curves = [(f"plain, {x.trial.rate:.2g}", f"C{index}", x) for index, x in enumerate(plain)]
            found.append((f"no run diverged{note}", curves))
        for worst in diverged:
            rate = worst.trial.rate
            curves = [(x.trial.label, COLORS[x.trial.contender], x) for x in own if x.trial.rate == rate]
            lower = [x for x in plain if x.trial.rate < rate][-1:]
            curves += [(f"learning rate {x.trial.rate:.2g}", COLORS["lower"], x) for x in lower]
            found.append((f"learning rate {rate:.2g}{note}", curves))
    return found


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the loss and, on a logarithmic axis, the largest logit of all heads."""
    from matplotlib import pyplot as plt

    shown = panels(results)
    with plt.rc_context({"svg.hashsalt": "polyhead", "svg.fonttype": "none"}):  # the same file for the same results
        figure, axes = plt.subplots(
            2, len(shown), figsize=(1 + 4.5 * len(shown), 5), squeeze=False, sharex=True, layout="constrained"
        )
        for (title, curves), (upper, lower) in zip(shown, axes.T, strict=True):
            for label, color, result in curves:
                upper.plot(result.losses, color=color, linewidth=1, label=label)
                lower.plot(result.max_logits, color=color, linewidth=1)
            for x in sorted({x.trial.threshold for _, _, x in curves if x.trial.threshold is not None}):
                lower.axhline(x, color="0.6", linewidth=0.8, linestyle="--")
            upper.set(title=title, ylim=(None, 6))
            upper.legend(fontsize="small")
            lower.set(yscale="log", xlabel="step")
        axes[0, 0].set_ylabel("loss, nats per byte")
        axes[1, 0].set_ylabel("largest logit of all heads")
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
