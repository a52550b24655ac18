"""Prefill and decoding."""
