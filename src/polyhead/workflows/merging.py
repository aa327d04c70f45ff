"""`polyhead.merge`: merge redundant heads of a layer into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polyhead.geometry import HeadId, parse_head_groups
from polyhead.surgery.edits.head_edits import MergeHeads
from polyhead.surgery.edits.preview import check_edits
from polyhead.surgery.edits.preview import preview as count
from polyhead.surgery.options import Form, check_form
from polyhead.workflows.edited_model import EditedModel, apply_edits
from polyhead.workflows.model_loading import Model, as_loaded

Groups = str | Iterable[Sequence[HeadId | tuple[int, int]]]


def merge(
    model: Model, heads: Groups, *, form: Form = "uniform", preview: bool = False, stack: str | None = None
) -> EditedModel:
    """Merge redundant heads into one; edits the model in place.

    Averages their Q, K and V projections and sums their output projections: identical heads are merged without loss.

    Args:
        model: as in `polyhead.prune`.
        heads: groups of heads of one layer, as [[(1, 3), (1, 7)], ...] or "L1H3+L1H7,..."; numbers are those before any
            merge.
        form: form of the saved model, as in `polyhead.prune`.
        preview: only compute the effect on size and cost; the model is not changed.
        stack: the stack of layers to edit, for models with several (encoder and decoder).

    Returns:
        The edited model, with its preview, `save` and `undo`.

    Raises:
        OptionError: heads that do not exist or cannot be merged.

    >>> import torch, polyhead
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> edited = polyhead.merge(model, [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(1, 0), (1, 2)], [(1, 1), (1, 3)]])
    >>> edited.preview.before.heads, edited.preview.after.heads
    (8, 4)
    """
    check_form(form)
    edits = merge_edits(heads, stack)
    loaded = as_loaded(model, dtype="saved", check=lambda network: check_edits(network, edits, form))
    counted = count(loaded.model, edits)
    if preview:
        return EditedModel(loaded=loaded, edits=tuple(edits), preview=counted, form=form)
    record, attention = apply_edits(loaded.model, edits)
    return EditedModel(
        loaded=loaded, edits=tuple(edits), preview=counted, form=form, record=record, attention=attention
    )


def merge_edits(heads: Groups, stack: str | None = None) -> list[MergeHeads]:
    """Return the edits that merge groups of heads, numbered for being applied in order: a merge shifts later heads.

    >>> [edit.heads for edit in merge_edits("L1H0+L1H2,L1H3+L1H5")]
    [(0, 2), (2, 4)]
    """
    removed: dict[int, list[int]] = {}
    edits = []
    for group in parse_head_groups(heads):
        layer = group[0].layer
        removed_before = removed.setdefault(layer, [])
        renumbered = tuple(head.head - sum(other < head.head for other in removed_before) for head in group)
        edits.append(MergeHeads(layer, renumbered, stack=stack))
        removed_before += sorted(head.head for head in group)[1:]
    return edits
