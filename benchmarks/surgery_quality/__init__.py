"""What a model keeps of its quality when heads are taken out of it: by criterion, share, repair and seed."""
