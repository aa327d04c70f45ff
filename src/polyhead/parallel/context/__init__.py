"""Context parallel: a sequence split over several ranks, with exact attention and exact row statistics."""
