"""Results of benchmarks and the checks that precede every timing."""
