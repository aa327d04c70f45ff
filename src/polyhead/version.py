"""The version of the package, for those who may not import it whole."""

VERSION = "0.1.0"
