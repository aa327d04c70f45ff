"""Arrangements of heads trained side by side on one text: equal parameters, then equal compute."""
