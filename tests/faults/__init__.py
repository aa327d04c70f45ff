"""Faults that are planted into a copy of the source, one at a time, to see which test notices each of them."""
