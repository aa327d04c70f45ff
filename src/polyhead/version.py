"""Package version, in a module of its own so that it can be read without importing torch."""

VERSION = "0.1.0"
