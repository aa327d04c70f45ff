"""The live viewer: a model, the texts it has read, and a small server on this machine that shows its attention."""
