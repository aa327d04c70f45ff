"""How long work takes: machines as they were measured, physics, and what lies between."""
