"""Loops over the blocks of a model, and what their backward computes again."""
