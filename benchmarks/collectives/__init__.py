"""Bytes of collectives over gloo processes."""
