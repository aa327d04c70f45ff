"""`polyhead.undo`: restore the original of an edited model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.sources.model_source import check_transformers
from polyhead.surgery.edits.applying import undo as revert
from polyhead.surgery.edits.records import EditRecord
from polyhead.surgery.options import Form
from polyhead.surgery.storage.loading import load, load_record, load_saved
from polyhead.surgery.storage.saving import SavedModel, save
from polyhead.surgery.storage.side_files import SideFiles
from polyhead.surgery.storage.undo_folder import check_edited


@dataclass(frozen=True, slots=True, eq=False)
class RestoredModel:
    """The original of an edited model, and the record of the edits that were reverted; `folder` is the edited one's."""

    model: nn.Module
    record: EditRecord
    folder: Path

    def save(self, folder: str | os.PathLike[str], *, form: Form = "uniform", replace: bool = False) -> SavedModel:
        """Save the model to a new folder, with the tokenizer and other files of the edited one.

        Another `form` than uniform is needed only if this is itself an edited model.
        """
        return save(self.model, folder, form=form, tokenizer=SideFiles(self.folder), replace=replace)


def undo(folder: str | os.PathLike[str], *, progress: ProgressCallback = ignore_progress) -> RestoredModel:
    """Restore the original of an edited model that was saved with its record, FOLDER.undo, bit for bit.

    Reverts all edits since the original. Fingerprints of the weights are checked before and after: a model that was
    trained in between is rejected. `EditedModel.undo` reverts edits in memory.

    Args:
        folder: folder of the edited model.
        progress: called with the progress.

    Returns:
        The restored model, whose `save` writes it.

    Raises:
        OptionError: the folder has no record.
        CheckpointError: its weights are not those that were saved, or the record is damaged.

    >>> import torch, polyhead
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> import tempfile
    >>> edited = polyhead.prune(model, "L0H2,L0H3,L1H2,L1H3", compensate=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = edited.save(f"{folder}/pruned")
    ...     original = polyhead.undo(f"{folder}/pruned").model
    >>> original.model.layers[0].self_attn.q_proj.weight.shape
    torch.Size([32, 32])
    """
    path = Path(folder).expanduser()
    check_edited(path)
    check_transformers()
    record = load_record(path)
    assert record is not None
    progress(Progress("Load the model"))
    saved = load_saved(path, switch_attention=False)
    model = load(path) if saved is None else saved
    revert(model, record)
    return RestoredModel(model, record, path)
