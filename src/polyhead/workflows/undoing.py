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
from polyhead.surgery.storage.folders import check_edited
from polyhead.surgery.storage.loading import load, load_record, load_saved
from polyhead.surgery.storage.saving import SavedModel, save
from polyhead.surgery.storage.side_files import SideFiles


@dataclass(frozen=True, slots=True, eq=False)
class RestoredModel:
    """The original of an edited model, and the record of the edits that were reverted; `folder` is the edited one's."""

    model: nn.Module
    record: EditRecord
    folder: Path

    def save(self, folder: str | os.PathLike[str], *, replace: bool = False) -> SavedModel:
        """Save the model to a new folder, with the tokenizer and other files of the edited one."""
        return save(self.model, folder, tokenizer=SideFiles(self.folder), replace=replace)


def undo(folder: str | os.PathLike[str], *, progress: ProgressCallback = ignore_progress) -> RestoredModel:
    """Restore the original of an edited model that was saved with its record, bit for bit.

    Reverts all edits since the original. Fingerprints of the weights are checked before and after: a model that was
    trained in between is rejected. `EditedModel.undo` reverts edits in memory.
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
