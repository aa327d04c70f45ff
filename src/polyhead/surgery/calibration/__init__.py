"""Activations, moments and gradients of attention layers on calibration text."""
