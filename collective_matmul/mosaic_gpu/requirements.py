"""What all kernels that address peers share: where they can run, their blocks, random delays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from collective_matmul._compat import partly_automatic
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.matmul_kernel import BLOCK_AXES

# Delays are less than this many of these.
_DELAYS = 64
DELAY_NANOSECONDS = 256


#: What has a shape and a dtype.
Array = jax.Array | jax.ShapeDtypeStruct


def unsupported_reason(devices: int, *arrays: Array) -> str | None:
    """Why no kernel can work on arrays and on so many peers' along an axis, in words; or None."""
    if device.target() is None:
        return "these kernels run on Hopper GPUs only"
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__}: these kernels need 0.11 or newer"
    if jax.process_count() > 1:
        return (
            f"{jax.process_count()} processes: these kernels address peers' memory, which is"
            " possible within one process only; run one process per node"
        )
    if partly_automatic():
        return "these kernels cannot be divided over automatic mesh axes; make all axes manual"
    dtypes = {jnp.dtype(array.dtype).name for array in arrays}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16"}:
        return f"dtypes {sorted(dtypes)}: these kernels take bfloat16, or float16, for all"
    if devices == 1:
        return "an axis of size 1: there is nothing to communicate"
    if not all(array.size for array in arrays):
        return "an array without elements: there is nothing to multiply"
    return None


def block() -> tuple[Any, int]:
    """The number of this block, and how many there are."""
    number, blocks = 0, 1
    for axis in ("cluster", *BLOCK_AXES):
        number = number * lax.axis_size(axis) + lax.axis_index(axis)
        blocks *= lax.axis_size(axis)
    return number, blocks


def delays_of(device: Any, block: Any, number: Any) -> Any:
    """How often to wait for `DELAY_NANOSECONDS`, of a device and a block."""
    seed = (number * 8_191 + block) * 64 + device
    # A linear congruential generator's step; its upper bits are random.
    drawn = lax.shift_right_logical(seed * 1_664_525 + 1_013_904_223, 8)
    return lax.rem(drawn, _DELAYS)


def delays_here(device: Any, number: Any) -> Any:
    """`delays_of` a device and this block."""
    return delays_of(device, block()[0], number)


def delay(times: Any) -> None:
    """Has a warpgroup wait for so often `DELAY_NANOSECONDS`."""
    pl.delay(times * DELAY_NANOSECONDS)
