"""Analysis of heads from observations: roles, redundancy, circuits, importance and syntax."""
