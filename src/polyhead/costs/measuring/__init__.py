"""Timing: contenders alternate, ratios are paired, and the machine is recorded with the result."""
