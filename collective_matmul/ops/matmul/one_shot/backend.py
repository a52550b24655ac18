"""XLA's matmuls with collectives of our own, in which every device writes to all peers at once.

With few rows, a collective of NCCL takes longer to start and end than to send its data.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from collective_matmul.dispatch.contract import Prediction
from collective_matmul.hardware import HOPPER, rates
from collective_matmul.mosaic_gpu import requirements
from collective_matmul.operands.format import PLAIN
from collective_matmul.ops.matmul.matmul_cost import multiplication_seconds
from collective_matmul.ops.matmul.one_shot import exchange_kernel
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.xla import SequentialBackend
from collective_matmul.peer_access import no_peer_access_reason

#: Predictions err by a tenth, and those of XLA with few rows by up to a fifth.
ERROR = 0.15

# Measured in a program on H200 GPUs: the launch with its signals, and the bandwidth from one device
# to all of its peers together.
_SECONDS = 7e-6
_BYTES_PER_SECOND = 2.4e11


class OneShot(SequentialBackend):
    """One-shot collectives; all-reduces of more data in two shots."""

    name = "one_shot"
    uses_peer_kernels = True

    def all_gather(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., m, ...] -> [..., D*m, ...]."""
        shards = jnp.moveaxis(exchange_kernel.all_gather(x, axis_name), 0, dimension)
        whole = list(x.shape)
        whole[dimension] *= lax.axis_size(axis_name)
        return shards.reshape(whole)

    def reduce_scatter(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., D*m, ...] -> [..., m, ...]."""
        before, after = x.shape[:dimension], x.shape[dimension + 1 :]
        shards = x.reshape(*before, lax.axis_size(axis_name), -1, *after)
        return exchange_kernel.reduce_scatter(jnp.moveaxis(shards, dimension, 0), axis_name)

    def all_reduce(self, x: jax.Array, axis_name: str) -> jax.Array:
        """[...] -> [...], in one shot; in two, which send less together, where that is faster."""
        devices = lax.axis_size(axis_name)
        if not is_two_shot(x.nbytes, devices):
            return exchange_kernel.all_reduce(x, axis_name)
        parts = jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1)
        sums = exchange_kernel.reduce_scatter(parts, axis_name)
        whole = exchange_kernel.all_gather(sums, axis_name, replicated=True)
        return whole.reshape(-1)[: x.size].reshape(x.shape)

    def unsupported_reason(self, site: Site) -> str | None:
        """Exchanges are limited by the kernel's requirements and the size of the workspace."""
        if site.format != PLAIN:
            return f"operands in {site.format.kind}: these exchanges send wider numbers only"
        reasons = (
            exchange_kernel.unsupported_reason(array, site.axis_size) for array in _sent(site)
        )
        reason = next(filter(None, reasons), None) or no_peer_access_reason()
        return reason or requirements.workspaces_reason(site.transport)

    def predict(self, site: Site) -> Prediction | None:
        """XLA's matmuls, and the exchanges, which start and end faster than collectives."""
        if rates() is None or self.unsupported_reason(site):
            return None
        seconds = multiplication_seconds(site) + _site_seconds(site)
        return Prediction(seconds, ERROR, HOPPER.basis)


def exchange_seconds(size: int, devices: int) -> float:
    """Predicted seconds of one exchange, in which each device sends `size` bytes to each peer."""
    return _SECONDS + (devices - 1) * size / _BYTES_PER_SECOND


def is_two_shot(size: int, devices: int) -> bool:
    """Whether an all-reduce of `size` bytes is a reduce-scatter and an all-gather.

    These are two exchanges of less data each, which is faster from some size on.
    """
    two_shot = 2 * exchange_seconds(-(-size // devices), devices)
    return size > exchange_kernel.MOST_BYTES or two_shot < exchange_seconds(size, devices)


def _site_seconds(site: Site) -> float:
    sizes = (math.prod(array.shape) * site.dtype.itemsize for array in _sent(site))
    return sum(exchange_seconds(size, site.axis_size) for size in sizes)


def _sent(site: Site) -> list[jax.ShapeDtypeStruct]:
    """The arrays that each device sends to each peer, exchange by exchange."""
    x, (_, columns) = site.operands[0]
    product = math.prod(x[:-1]) * columns
    share = math.ceil(product / site.axis_size)
    if site.op == "all_gather_matmul":
        shapes = [x]
    elif site.op == "matmul_reduce_scatter":
        shapes = [(share,)] + ([] if site.co_gathered is None else [site.co_gathered])
    elif is_two_shot(product * site.dtype.itemsize, site.axis_size):
        shapes = [(share,)] * 2
    else:
        shapes = [(product,)]
    return [jax.ShapeDtypeStruct(shape, site.dtype) for shape in shapes]
