"""Native transformers configs for edited heads, and zero-padding where none describes them."""
