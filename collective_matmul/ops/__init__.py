"""The ops: a folder for each family, with its functions, requests, gradients and backends."""

from __future__ import annotations

from typing import Any

_MOVED = (
    "CHECKPOINT_NAME",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
)


def __getattr__(name: str) -> Any:
    """Names of earlier releases, which `collective_matmul` itself has."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported late: this module is imported before the ops are.
    import collective_matmul
    from collective_matmul.source_location import warn_deprecated

    warn_deprecated(f"collective_matmul.ops.{name} is now collective_matmul.{name}")
    return getattr(collective_matmul, name)
