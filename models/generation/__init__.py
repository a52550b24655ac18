"""Answers of a model to prompts: prefill and decoding with a sharded cache of keys and values."""

from models.generation.adapter_params import adapters_in_common
from models.generation.generator import Generator, Sampling

__all__ = ["Generator", "Sampling", "adapters_in_common"]
