"""Result of an editing workflow: the model, the effect of the edits, and the record that undoes them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import nn

from polyhead.errors import CheckpointError, OptionError
from polyhead.integrations.huggingface import NAME, register, set_attention
from polyhead.sources.models import IN_MEMORY, LoadedModel
from polyhead.surgery.adapters.discovery import has_key_maps, head_origins
from polyhead.surgery.compensation.least_squares import OutputProjection, PrecomputedProjections
from polyhead.surgery.edits.applying import apply, undo
from polyhead.surgery.edits.head_edits import HeadEdit
from polyhead.surgery.edits.preview import Preview
from polyhead.surgery.edits.records import EditRecord, join_records
from polyhead.surgery.native.configs import configs_of
from polyhead.surgery.options import Form
from polyhead.surgery.selection.quality import Measurement
from polyhead.surgery.storage.loading import load_record
from polyhead.surgery.storage.saving import SavedModel, save
from polyhead.surgery.storage.side_files import SideFiles

# For each model in memory, the edits that are in effect, in order: the fingerprint after the edit, and its result.
_RESULTS: WeakKeyDictionary[nn.Module, list[tuple[str, ReferenceType[EditedModel]]]] = WeakKeyDictionary()


class AttentionSwitch:
    """The attention implementations that a model has before an edit, to be restored when the edit is undone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        module_configs = [getattr(module, "config", None) for module in model.modules()]
        outer_configs = [config for config in module_configs if hasattr(config, "sub_configs")]
        configs = [config for outer in outer_configs for _, config in configs_of(outer)]
        # The private attribute: the public setter also changes other configs.
        self._before = [(config, config._attn_implementation_internal) for config in configs]

    def to_polyhead(self) -> None:
        """Switch the model to polyhead's attention."""
        set_attention(self._model, register())

    def restore(self) -> None:
        """Restore the implementations, except those that the user has changed since the switch."""
        for config, implementation in self._before:
            if config._attn_implementation_internal == NAME:
                config._attn_implementation_internal = implementation


def apply_edits(
    model: nn.Module, edits: Sequence[HeadEdit], projections: Mapping[str, OutputProjection] | None = None
) -> tuple[EditRecord, AttentionSwitch]:
    """Apply edits to a model with compensated output projections, if any, and switch its attention if necessary.

    Returns the record and the switch that revert this.
    """
    attention = AttentionSwitch(model)
    record = apply(model, edits, compensation=None if projections is None else PrecomputedProjections(projections))
    if has_key_maps(model):  # groups of query heads that no other attention supports
        attention.to_polyhead()
    return record, attention


@dataclass(frozen=True, eq=False, kw_only=True)
class EditedModel:
    """A model with edited heads: `loaded.model` itself, edited in place.

    A converted model, and one with uneven groups, runs on polyhead's attention until `undo`. `preview` counts heads,
    parameters, FLOPs and cache before and after. `form` is the form that the edits were requested for and that `save`
    writes. With `preview=True` the model is not edited, and `record` is None.

    `quality` is measured on `held_out_tokens` tokens that did not calibrate the edit; None if there were none. `metric`
    is "perplexity", of causal models, or "fidelity", the mean cosine of final hidden states with those of the original;
    `original` is its value before the edit, and `not_compensated` that of the pruned model without compensation.
    `compensation` names how pruned heads were compensated for. With a test text, `calibration_original` is the
    perplexity of the original model on the text that calibrated the edit.
    """

    loaded: LoadedModel
    edits: tuple[HeadEdit, ...]
    preview: Preview
    form: Form
    record: EditRecord | None = None
    metric: str | None = None
    original: float | None = None
    quality: Measurement | None = None
    not_compensated: Measurement | None = None
    contexts: int = 0  # of the text
    held_out_tokens: int = 0
    held_out_contexts: int = 0
    held_out_groups: int = 0  # documents, or stretches of them
    compensation: str = ""
    calibration_original: float | None = None
    attention: AttentionSwitch | None = None
    _previous: EditedModel | None = field(init=False, repr=False, default=None)  # result of the previous edit in memory
    _was_edited: bool = field(init=False, repr=False, default=False)  # whether the model had been edited before

    def __post_init__(self) -> None:
        """Register this edit, and find the result of the previous edit of the model in memory."""
        if self.record is None:
            return
        earlier = _RESULTS.get(self.model, [])
        while earlier and earlier[-1][0] != self.record.before:  # edits undone, or weights changed since
            earlier = earlier[:-1]
        _RESULTS[self.model] = [*earlier, (self.record.after, ref(self))]
        object.__setattr__(self, "_previous", earlier[-1][1]() if earlier else None)
        before = {layer.path: layer.origins for layer in self.record.layers}
        has_edited_heads = not all(x.is_unedited for x in {**head_origins(self.model), **before}.values())
        object.__setattr__(self, "_was_edited", bool(earlier) or has_edited_heads)

    @property
    def model(self) -> Any:
        return self.loaded.model

    def save(self, folder: str | os.PathLike[str], *, replace: bool = False) -> SavedModel:
        """Save the model to a new folder in its form, with its tokenizer, and the record for `polyhead.undo` beside it.

        `replace` is that of `polyhead.surgery.save`. The record of an original that was edited before is joined with
        this one where possible (`undo_caveat`).
        """
        return save(
            self.model, folder, form=self.form, record=self._whole_record, tokenizer=self._side_files, replace=replace
        )

    def undo(self) -> None:
        """Revert the edits in place, bit for bit, and restore the attention implementation."""
        undo(self.model, self._record())
        if self.attention is not None:
            self.attention.restore()

    @property
    def undo_caveat(self) -> str:
        """The reason why the saved record does not revert edits made before this one; empty if it reverts all."""
        if isinstance(self._earlier, str):
            return self._earlier
        if self._earlier is None or self._earlier.after == self._record().before:
            return "" if self._previous is None else self._previous.undo_caveat
        return "the weights were loaded in another dtype than they were saved in, or changed since"

    def _record(self) -> EditRecord:
        if self.record is None:
            raise OptionError("only an edited model can be saved or reverted, got a preview")
        return self.record

    @cached_property
    def _folder(self) -> Path | None:
        """Folder that the original was loaded from, if any."""
        origin = Path(str(self.model.config.name_or_path))
        return origin if origin.is_dir() and (origin / "config.json").is_file() else None

    @property
    def _whole_record(self) -> EditRecord:
        """Record of these edits and of the earlier ones that it can be joined with."""
        if isinstance(self._earlier, EditRecord) and self._earlier.after == self._record().before:
            return join_records(self._earlier, self._record())
        return self._record()

    @property
    def _side_files(self) -> Any:
        """Source of the tokenizer and other files that `save` copies: the folder of the original, if there is one.

        A tokenizer that was passed with a model in memory replaces that of the folder, unless the two are equal: then
        the files of the folder are copied byte for byte.
        """
        tokenizer = self.loaded.tokenizer
        if self._folder is None:
            return tokenizer
        is_passed = self.loaded.origin == IN_MEMORY and tokenizer is not None
        return SideFiles(self._folder, tokenizer if is_passed and not is_saved_in(tokenizer, self._folder) else None)

    @cached_property
    def _earlier(self) -> EditRecord | str | None:
        """Record of the edits before this one, or why it cannot be read; None if there were none."""
        if self._previous is not None:
            return self._previous._whole_record
        try:
            saved = None if self._folder is None else load_record(self._folder)
        except CheckpointError as error:
            return str(error)
        return "no record of them was saved or kept" if saved is None and self._was_edited else saved


def is_saved_in(tokenizer: Any, folder: Path) -> bool:
    """Return whether the tokenizer in a folder is this one."""
    import transformers

    try:
        saved = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError):
        return False
    return (
        type(saved) is type(tokenizer)
        and all(
            getattr(saved, name, None) == getattr(tokenizer, name, None)
            for name in ("added_tokens_decoder", "special_tokens_map", "chat_template")
        )
        and saved.get_vocab() == tokenizer.get_vocab()
    )
