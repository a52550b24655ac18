"""Overlap gathers and sums over devices with their matmuls, in any JAX program."""

from collective_matmul.rewrite.report import FoundSite
from collective_matmul.rewrite.transform import (
    find_sites,
    overlap,
    rewritten_program,
    sites_and_keys,
    sites_of,
    traced_program,
)

__all__ = [
    "FoundSite",
    "find_sites",
    "overlap",
    "rewritten_program",
    "sites_and_keys",
    "sites_of",
    "traced_program",
]
