"""Transformers with tensor and sequence parallelism, built from collective_matmul.layers."""
