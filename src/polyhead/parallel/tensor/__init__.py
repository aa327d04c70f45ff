"""Tensor parallel: the heads of attention layers over several ranks, with exact statistics."""
