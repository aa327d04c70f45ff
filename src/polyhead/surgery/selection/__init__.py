"""Choose which heads to prune, and measure the quality of the model without them."""
