"""The attention layers of models as values, read from whatever says them."""
