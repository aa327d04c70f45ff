"""How a figure is taken: contenders alternate, ratios are paired, and the machine stands beside the result."""
