"""Pallas Mosaic GPU kernels for Hopper: the matmuls that rings are made of."""

from collective_matmul.kernels.chunks import Rows, contract_chunks, multiply_chunks

__all__ = ["Rows", "contract_chunks", "multiply_chunks"]
