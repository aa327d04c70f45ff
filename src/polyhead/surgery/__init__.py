"""Changing the heads of a trained model: described, counted, made and undone."""

from polyhead.surgery.align import AlignHeads, aligned
from polyhead.surgery.anatomy import AttentionLayer, find_layers
from polyhead.surgery.apply import apply, take_shape, undo
from polyhead.surgery.choosing import PruningOrder, choose_heads, pruning_order
from polyhead.surgery.convert import convert_groups
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
from polyhead.surgery.folders import SideFiles
from polyhead.surgery.fused_heads import FuseHeads, fuse
from polyhead.surgery.head_weights import HeadWeights, read_heads
from polyhead.surgery.in_order import apply_in_order
from polyhead.surgery.joining import join_records
from polyhead.surgery.key_forms import KeyForm, find_key_forms
from polyhead.surgery.loading import load, load_record
from polyhead.surgery.moments import OutputMoments, gather_moments
from polyhead.surgery.preview import HeadCounts, LayerPreview, Preview, preview
from polyhead.surgery.records import EditRecord
from polyhead.surgery.repair import OutputRepair
from polyhead.surgery.saving import SavedModel, save
from polyhead.surgery.sensitivity import loss_weights
from polyhead.surgery.shared_keys import ShareKeys, share
from polyhead.surgery.symmetries import turn_keys, turn_values

__all__ = [
    "AlignHeads",
    "AttentionLayer",
    "EditRecord",
    "FuseHeads",
    "GroupQueries",
    "HeadCounts",
    "HeadEdit",
    "HeadWeights",
    "KeyForm",
    "LayerPreview",
    "MergeHeads",
    "OutputMoments",
    "OutputRepair",
    "Preview",
    "PruneHeads",
    "PruningOrder",
    "ReorderHeads",
    "ReviveHeads",
    "SavedModel",
    "ShareKeys",
    "SideFiles",
    "aligned",
    "apply",
    "apply_in_order",
    "choose_heads",
    "convert_groups",
    "edits_from_json",
    "edits_to_json",
    "find_key_forms",
    "find_layers",
    "fingerprint",
    "fuse",
    "gather_moments",
    "join_records",
    "load",
    "load_record",
    "loss_weights",
    "preview",
    "pruning_order",
    "read_heads",
    "save",
    "share",
    "take_shape",
    "turn_keys",
    "turn_values",
    "undo",
]
