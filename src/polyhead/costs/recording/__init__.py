"""Recording of a layer's operations: pieces of work, and tensors from allocation to release."""
