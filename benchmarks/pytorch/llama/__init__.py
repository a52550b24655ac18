"""Llamas: a training step, and prefill with decoding."""
