"""Whether the alarms of `polyhead.training.HeadAlarms` come before a planted instability, and not in healthy runs."""
