"""nnx modules whose column-parallel layers share the gather of one x."""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx

from collective_matmul.layers.linear.linear import shared_gather
from collective_matmul.layers.linear.shared_calls import SharedCalls, sharing
from collective_matmul.layers.parallelize.nnx_adapters import base_of


def shared_layers(module: nnx.Module) -> tuple[str, ...]:
    """The attributes of a module that are layers which share a gather by `parallel_shared`."""
    return getattr(type(module), "shares_gather", ())


@functools.cache
def parallel_shared(kind: type[nnx.Module], names: tuple[str, ...]) -> type[nnx.Module]:
    """A subclass of a module's class, in whose calls some of its layers share a gather.

    Args:
      kind: a class with a `__call__`, which calls the layers one by one on one x.
      names: the attributes that are the layers.
    """

    class ParallelShared(kind):
        #: The layers that share a gather.
        shares_gather = names

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            layers = [getattr(self, name) for name in names]
            compute = functools.partial(shared_gather, layers=layers)
            calls = SharedCalls(kind.__name__, names, compute)
            with sharing(calls, [base_of(layer) for layer in layers]):
                y = super().__call__(*arguments, **options)  # pyright: ignore
            calls.check_complete()
            return y

    ParallelShared.__name__ = ParallelShared.__qualname__ = f"Parallel{kind.__name__}"
    return ParallelShared
