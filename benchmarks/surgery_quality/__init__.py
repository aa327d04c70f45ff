"""Quality of a pruned model: by criterion, share, compensation and seed."""
