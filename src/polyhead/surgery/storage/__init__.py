"""Folders of edited models: written atomically and read back."""
