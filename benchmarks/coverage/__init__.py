"""Which models' heads polyhead observes: every family is built small, observed, and judged by an independent oracle."""
