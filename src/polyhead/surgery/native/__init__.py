"""What a class of transformers has room for: its config, and heads of zeros where that is not enough."""
