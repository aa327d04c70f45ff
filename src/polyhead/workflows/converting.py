"""`polyhead.convert`: fewer KV heads for a trained model, and so a smaller KV cache."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyhead.progress import ProgressCallback, Step, ignore_progress
from polyhead.sources.text_contexts import Text
from polyhead.sources.texts import TOKENS
from polyhead.surgery.edits.head_edits import HeadEdit
from polyhead.surgery.edits.preview import check_edits
from polyhead.surgery.edits.preview import preview as count
from polyhead.surgery.kv_sharing.conversion import convert_groups, layers_to_convert, share_neighbours
from polyhead.surgery.options import Form, Grouping, check_conversion, check_form
from polyhead.workflows.calibration_text import CalibrationText, model_inputs
from polyhead.workflows.edited_model import AttentionSwitch, EditedModel
from polyhead.workflows.evaluating import evaluate, measure_original
from polyhead.workflows.model_loading import Model, as_loaded


def convert(
    model: Model,
    kv_heads: int,
    *,
    text: Text = None,
    field: str = "text",
    grouping: Grouping = "similar",
    rounds: int = 0,
    form: Form = "uniform",
    preview: bool = False,
    stack: str | None = None,
    context: int | None = None,
    tokens: int = TOKENS,
    tokenizer: Any = None,
    progress: ProgressCallback = ignore_progress,
) -> EditedModel:
    """Convert a trained model to fewer KV heads (GQA or MQA), without retraining; edits the model in place.

    Merges similar KV heads in closed form and compensates the output projections by least squares on a text. The model
    then runs on polyhead's attention, which supports groups that the config of its family cannot express.

    Args:
        kv_heads: KV heads per layer after the conversion; must divide the current number. 1 is multi-query attention.
        grouping: merge KV heads that are "similar", or "neighbours".
        rounds: rounds of alternating least squares that refit the shared K and V projections to the text.
        tokens: maximum number of tokens of text, which is sampled over all of it.
        model, text, field, form, preview, stack, context, tokenizer, progress: as in `polyhead.prune`.

    Returns:
        The edited model, with its preview, its quality on held-out text, `save` and `undo`.

    Raises:
        OptionError: `kv_heads` does not divide the model's, or the text is too short.

    >>> import torch, polyhead
    >>> from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    >>> tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes
    >>> config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> text = ["the cat sat on the mat. " * 20] * 2
    >>> edited = polyhead.convert(model, 2, text=text, tokenizer=tokenizer, context=64, tokens=512)
    >>> edited.preview.before.kv_heads, edited.preview.after.kv_heads
    (8, 4)
    """
    check_conversion(kv_heads, grouping, rounds)
    check_form(form)

    def edits_of(network: nn.Module) -> tuple[HeadEdit, ...]:
        """Return edits of the same shapes; the groups may be others."""
        return tuple(share_neighbours(layer, kv_heads) for layer in layers_to_convert(network, kv_heads, stack))

    loaded = as_loaded(
        model, tokenizer, dtype="saved", check=lambda network: check_edits(network, edits_of(network), form)
    )
    edits = edits_of(loaded.model)
    counted = count(loaded.model, edits)
    if preview:
        return EditedModel(loaded=loaded, edits=edits, preview=counted, form=form)
    calibration = CalibrationText.of(loaded, text, field=field, context=context, tokens=tokens, selects=False)
    attention = AttentionSwitch(loaded.model)
    attention.to_polyhead()
    try:
        original = measure_original(calibration)
        step = Step(progress, "Merge KV heads, layer by layer", len(edits), "layers")
        record = convert_groups(
            loaded.model,
            kv_heads,
            lambda: model_inputs(loaded, calibration.calibrating),
            stack=stack,
            grouping=grouping,
            rounds=rounds,
            progress=lambda *_: step.advance(),
        )
    except BaseException:
        attention.restore()
        raise
    return EditedModel(
        loaded=loaded,
        edits=record.edits,
        preview=counted,
        form=form,
        record=record,
        attention=attention,
        **vars(evaluate(calibration, original)),
    )
