"""Head layouts of models as values, read from configs, files and names."""
