"""Random delays that tests inject into kernels, so that races between devices show."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu
from jax.extend.mlir import ir

# Typed as Any: its own annotations are narrower than what it accepts.
plgpu: Any = mosaic_gpu

# A delay is a random multiple of this, less than `_MAX_STEPS` times.
_STEP_NANOSECONDS = 256
_MAX_STEPS = 64


def race_delay_steps(device: Any, number: Any, block: Any) -> Any:
    """Returns a pseudo-random number of delay steps, for one store of a block of a device."""
    seed = (number * 8_191 + block) * 64 + device
    # One step of a linear congruential generator; its upper bits are random.
    drawn = lax.shift_right_logical(seed * 1_664_525 + 1_013_904_223, 8)
    return lax.rem(drawn, _MAX_STEPS)


def delay_warpgroup(steps: Any) -> None:
    """Delays the warpgroup that calls this."""
    pl.delay(steps * _STEP_NANOSECONDS)


def delay_warp(steps: Any) -> None:
    """Delays the warp that calls this. `pl.delay` is for whole warpgroups."""

    @pl.loop(0, steps)
    def _(_):
        _sleep_one_step()


@plgpu.inline_mgpu()
def _sleep_one_step(_) -> None:
    mosaic.nanosleep(mosaic.c(_STEP_NANOSECONDS, ir.IntegerType.get_signless(32)))
