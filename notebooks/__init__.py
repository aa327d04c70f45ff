"""Four notebooks, stored with their outputs; `python -m notebooks` runs them without Jupyter."""

NOTEBOOKS = ("look_at_heads", "watch_training", "prune_convert_undo", "plan_layout")
