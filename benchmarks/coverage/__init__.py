"""Coverage of model families: each is built small, observed, and compared with an independent oracle."""
