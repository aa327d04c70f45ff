"""Attention of selected query rows, different ones in every head."""

from polyhead.ops.selected_rows.api import RaggedRows, ragged_attention

__all__ = ["RaggedRows", "ragged_attention"]
