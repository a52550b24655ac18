"""Layers and training steps, and where a step's time goes."""
