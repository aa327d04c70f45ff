"""Changing the heads of a trained model: described, counted, made and undone."""

from polyhead.surgery.anatomy import AttentionLayer, find_layers
from polyhead.surgery.apply import apply, take_shape, undo
from polyhead.surgery.choosing import PruningOrder, choose_heads, pruning_order
from polyhead.surgery.edits import (
    GroupQueries,
    HeadEdit,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    ReviveHeads,
    edits_from_json,
    edits_to_json,
)
from polyhead.surgery.fingerprint import fingerprint
from polyhead.surgery.head_weights import HeadWeights, read_heads
from polyhead.surgery.moments import OutputMoments, gather_moments
from polyhead.surgery.preview import HeadCounts, LayerPreview, Preview, preview
from polyhead.surgery.records import EditRecord
from polyhead.surgery.repair import OutputRepair, apply_in_order
from polyhead.surgery.sensitivity import loss_weights

__all__ = [
    "AttentionLayer",
    "EditRecord",
    "GroupQueries",
    "HeadCounts",
    "HeadEdit",
    "HeadWeights",
    "LayerPreview",
    "MergeHeads",
    "OutputMoments",
    "OutputRepair",
    "Preview",
    "PruneHeads",
    "PruningOrder",
    "ReorderHeads",
    "ReviveHeads",
    "apply",
    "apply_in_order",
    "choose_heads",
    "edits_from_json",
    "edits_to_json",
    "find_layers",
    "fingerprint",
    "gather_moments",
    "loss_weights",
    "preview",
    "pruning_order",
    "read_heads",
    "take_shape",
    "undo",
]
