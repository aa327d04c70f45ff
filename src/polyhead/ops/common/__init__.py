"""Code shared by the operations: mask tiles, softmax state, statistics, non-finite values, tracing."""
