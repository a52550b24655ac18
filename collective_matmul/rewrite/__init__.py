"""Overlap gathers and sums over devices with their matmuls, in any JAX program.

A program goes through three folders: `find` describes what communicates, `match` finds its matmuls,
and `replace` puts ops in place of both. `rewriter` takes each jaxpr of the program through them.
`transform` is what users call.
"""

from collective_matmul.rewrite.find.report import FoundSite
from collective_matmul.rewrite.find.written_blocks import WrittenBlocks
from collective_matmul.rewrite.transform import (
    find_sites,
    overlap,
    rewritten,
    sites_of,
    traced_program,
)

__all__ = [
    "FoundSite",
    "WrittenBlocks",
    "find_sites",
    "overlap",
    "rewritten",
    "sites_of",
    "traced_program",
]
