"""The live viewer: a local server that shows the attention of a model on texts typed in a browser."""
