"""Where a model's heads live, and their weights as values."""
