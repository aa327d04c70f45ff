"""`polyhead.prune`: remove heads from a model and compensate for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadId, parse_heads
from polyhead.progress import ProgressCallback, ignore_progress
from polyhead.sources.text_contexts import Text
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.compensation.least_squares import unchanged_projections
from polyhead.surgery.edits.applying import edits_by_layer
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.edits.preview import check_edits
from polyhead.surgery.edits.preview import preview as count
from polyhead.surgery.options import Form, Target, check_selection
from polyhead.surgery.selection.budgets import RemovedHeads, prune_edits
from polyhead.surgery.selection.criteria import choose_heads, orders_by
from polyhead.surgery.selection.evidence import Evidence, editable_layers
from polyhead.surgery.selection.uniform import UniformSelection, heads_for_target
from polyhead.workflows.calibration_text import CalibrationText, collect_evidence
from polyhead.workflows.compensating import compensate as compensate_heads
from polyhead.workflows.edited_model import EditedModel, apply_edits
from polyhead.workflows.evaluating import evaluate, measure_original
from polyhead.workflows.model_loading import Model, as_loaded


def prune(
    model: Model,
    heads: str | Iterable[str | HeadId | tuple[int, int]] | None = None,
    *,
    share: float | None = None,
    criterion: str = "compensated",
    text: Text = None,
    field: str = "text",
    compensate: bool = True,
    form: Form = "uniform",
    preview: bool = False,
    stack: str | None = None,
    test_text: Text = None,
    context: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    progress: ProgressCallback = ignore_progress,
) -> EditedModel:
    """Remove heads from a trained model, without retraining; edits the model in place.

    Args:
        model: a name or folder, a transformers model in evaluation mode (with its `tokenizer`), or the result of
            `polyhead.workflows.model_loading.load_model`. Models loaded by name keep their saved dtype.
        heads: heads to remove, as (layer, head) or "L0H3,L1H7"; or else
        share: the share of all heads to remove, between 0 and 1, selected by `criterion`; in the uniform form the
            smallest that is at least this share and leaves a layout which the model's class supports. If that is more
            than 10 percentage points beyond it, an error lists the shares that are possible.
        criterion: importance score: compensated (error after compensation), plain (error without it), ablation,
            gradient, taylor, magnitude, redundancy, or random (a control, by `seed`). The uniform form needs the first.
        text: calibration text like the model's inputs: a path, or documents in memory; default: a short built-in text.
        compensate: refit the output projections of the remaining heads on the text, by least squares and distillation:
            one step of Adam for every 512 tokens, towards the outputs of the unpruned model.
        form: form in which `save` writes the model. "uniform": every layer keeps the same number of heads and KV heads,
            so that plain transformers loads it. "padded": any heads are removed, and saved as zeros; loads anywhere,
            saves nothing. "uneven": any heads are removed; smaller, loads with `polyhead.load`. A form that is
            impossible is refused by the model's config, before its weights are loaded.
        preview: only count the effect; the model is not changed. The layout of a `share` in the uniform form needs no
            text, and `edits` are then empty: which heads are removed is selected on the text.
        stack: the stack of layers to edit, for models with several (encoder and decoder).
        context: tokens per context; default: 512, or the model's maximum if smaller.
        test_text: another text to evaluate the edited model on; default: 2 of 8 documents of `text`, held out.
        tokens: maximum number of tokens of text, which is sampled over all of it; default: 24 for each channel of the
            widest layer, at least 12,288.
        progress: called with the progress of each step.
        field: JSON field or column of the text files.
        seed: seed of the criterion `random`.
        tokenizer: tokenizer of a model in memory.

    Returns:
        The edited model, with its preview, its quality on held-out text, `save` and `undo`.

    Raises:
        OptionError: heads that do not exist, both or neither of `heads` and `share`, or compensation without a
            tokenizer.

    >>> import torch, polyhead
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> edited = polyhead.prune(model, "L0H2,L0H3,L1H2,L1H3", compensate=False)  # compensation needs a text
    >>> edited.preview.before.heads, edited.preview.after.heads
    (8, 4)
    >>> edited.undo()  # in place, bit for bit
    >>> model.model.layers[0].self_attn.q_proj.weight.shape
    torch.Size([32, 32])
    """
    if (heads is None) == (share is None):
        raise OptionError("prune takes either heads or share, got both or neither")
    if share is not None and not 0 < share < 1:
        raise OptionError(f"share must be between 0 and 1, got {share}")
    check_selection(form, criterion, by_name=share is None, seed=seed)
    requested = None if heads is None else head_edits(heads, stack)
    target = None if share is None else Target("heads", share)

    def check(network: nn.Module) -> None:
        if requested is not None:
            check_edits(network, requested, form)
        elif target is not None and form == "uniform":
            heads_for_target(network, target, stack, option="--share")

    loaded = as_loaded(model, tokenizer, dtype="saved", check=check)
    if preview and target is not None and form == "uniform":
        some_heads = heads_for_target(loaded.model, target, stack, option="--share")
        counted = count(loaded.model, prune_edits(editable_layers(loaded.model), some_heads))
        return EditedModel(loaded=loaded, edits=(), preview=counted, form=form)
    parts = evidence = None
    if share is not None or (not preview and (compensate or text is not None or test_text is not None)):
        if loaded.tokenizer is None:
            raise OptionError(
                f"calibration needs a model that reads text and its tokenizer, got {loaded.name} without one; pass "
                "the heads to remove, and skip compensation (compensate=False, --no-compensate)"
            )
        parts = CalibrationText.of(
            loaded, text, field=field, context=context, tokens=tokens, test_text=test_text, selects=compensate
        )
        evidence = collect_evidence(parts, progress, stack=stack)
    if requested is not None:
        edits = requested
    else:
        assert evidence is not None and target is not None
        if form == "uniform":
            removed = UniformSelection(evidence, progress).for_target(target)
        else:
            removed = select_heads(evidence, target.amount, criterion=criterion, seed=seed)
        edits = prune_edits(evidence.layers, removed)
    counted = count(loaded.model, edits)
    edited: dict[str, Any] = {"loaded": loaded, "edits": tuple(edits), "preview": counted, "form": form}
    if preview:
        return EditedModel(**edited)
    if parts is None or evidence is None:
        record, attention = apply_edits(loaded.model, edits)
        return EditedModel(record=record, attention=attention, **edited)
    original = measure_original(parts)
    compensated = not_compensated = None
    if compensate:
        removed = _removed(loaded.model, edits)
        if original.held_out is not None:
            unchanged = unchanged_projections(loaded.model, evidence.layers, removed)
            not_compensated = original.held_out.measure(unchanged)
        compensated = compensate_heads(evidence, removed, parts, progress)
    record, attention = apply_edits(loaded.model, edits, None if compensated is None else compensated.projections)
    return EditedModel(
        record=record,
        attention=attention,
        not_compensated=not_compensated,
        compensation="" if compensated is None else compensated.method,
        **edited,
        **vars(evaluate(parts, original)),
    )


def _removed(model: nn.Module, edits: Sequence[PruneHeads]) -> RemovedHeads:
    """Return the heads that edits remove, by layer."""
    return {
        layer.path: edit.heads
        for layer, own in edits_by_layer(find_layers(model), edits)
        for edit in own
        if isinstance(edit, PruneHeads)
    }


def head_edits(heads: str | Iterable[str | HeadId | tuple[int, int]], stack: str | None = None) -> list[PruneHeads]:
    """Return the edits that remove heads, one per layer.

    >>> [(edit.layer, edit.heads) for edit in head_edits("L1H3,L0H2,L1H0")]
    [(0, (2,)), (1, (0, 3))]
    """
    by_layer: dict[int, list[int]] = {}
    for head in parse_heads(heads):
        by_layer.setdefault(head.layer, []).append(head.head)
    return [PruneHeads(layer, tuple(layer_heads), stack=stack) for layer, layer_heads in sorted(by_layer.items())]


def select_heads(evidence: Evidence, share: float, *, criterion: str, seed: int = 0) -> RemovedHeads:
    """Select the least important heads of a share by a criterion, over all layers of the evidence."""
    total = sum(heads.num_heads for heads in evidence.heads.values())
    number = round(share * total)
    if not number:
        raise OptionError(f"share must be at least one head, got {share:.1%} of {total} heads")
    return choose_heads(orders_by(criterion, evidence, weighting="token", seed=seed), number)
