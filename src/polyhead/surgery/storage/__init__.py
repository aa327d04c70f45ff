"""Edited models in folders: written whole and read again."""
