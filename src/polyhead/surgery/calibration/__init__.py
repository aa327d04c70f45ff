"""What a model shows of its layers while it reads a text."""
