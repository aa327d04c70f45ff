"""Attention variants trained on one text with equal parameters, over equal tokens and over equal compute."""
