"""What the heads do, from statistics alone."""
