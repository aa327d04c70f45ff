"""Small real experiments, each a claim with its evidence: they return values, and the command line shows them."""
