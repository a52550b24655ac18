"""Finds gathers and sums over devices beside matmuls in any program, and overlaps them."""

from collective_matmul.rewrite.report import FoundSite
from collective_matmul.rewrite.transform import find_sites, overlap

__all__ = ["FoundSite", "find_sites", "overlap"]
