"""Which heads can go, and what a model is worth without them."""
