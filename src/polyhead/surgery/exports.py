"""Public names of `polyhead.surgery`."""

from polyhead.geometry import HeadOrigins
from polyhead.sources.fingerprint import fingerprint
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers, head_origins
from polyhead.surgery.adapters.head_weights import HeadWeights, read_heads
from polyhead.surgery.calibration.key_transforms import KeyTransform, find_key_transforms
from polyhead.surgery.calibration.moments import OutputMoments, collect_moments, loss_weights
from polyhead.surgery.compensation.least_squares import OutputCompensation
from polyhead.surgery.edits.applying import apply, take_shape, undo
from polyhead.surgery.edits.head_edits import (
    GroupQueries,
    HeadEdit,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    ReviveHeads,
    edits_from_json,
    edits_to_json,
)
from polyhead.surgery.edits.preview import HeadCounts, LayerPreview, Preview, preview
from polyhead.surgery.edits.records import EditRecord, join_records
from polyhead.surgery.edits.tracing import trace_layers
from polyhead.surgery.kv_sharing.align import AlignHeads, aligned
from polyhead.surgery.kv_sharing.conversion import convert_groups
from polyhead.surgery.kv_sharing.fused_heads import FuseHeads, fuse
from polyhead.surgery.kv_sharing.shared_keys import ShareKeys, share
from polyhead.surgery.kv_sharing.symmetries import change_key_basis, change_value_basis
from polyhead.surgery.selection.criteria import PruningOrder, choose_heads, pruning_order
from polyhead.surgery.storage.loading import load, load_record
from polyhead.surgery.storage.saving import SavedModel, save
from polyhead.surgery.storage.side_files import SideFiles

__all__ = [
    "AlignHeads",
    "AttentionLayer",
    "EditRecord",
    "FuseHeads",
    "GroupQueries",
    "HeadCounts",
    "HeadEdit",
    "HeadOrigins",
    "HeadWeights",
    "KeyTransform",
    "LayerPreview",
    "MergeHeads",
    "OutputCompensation",
    "OutputMoments",
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
    "change_key_basis",
    "change_value_basis",
    "choose_heads",
    "collect_moments",
    "convert_groups",
    "edits_from_json",
    "edits_to_json",
    "find_key_transforms",
    "find_layers",
    "fingerprint",
    "fuse",
    "head_origins",
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
    "trace_layers",
    "undo",
]
