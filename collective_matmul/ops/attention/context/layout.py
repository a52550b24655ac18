"""The tokens of a sequence that each device has, and the chunks that a sequence is cut into.

Legend: S tokens of the sequence, D devices, s = S / D tokens of a device, c tokens of a chunk.

**Contiguous.** A device has one chunk, c = s: device d has chunk d of D. With a causal mask the
last device has most to do.

**Zigzag.** A device has two chunks, c = s / 2: device d has chunk d of 2 D and, after it, chunk
2 D - 1 - d. With a causal mask all devices have equally much to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Layout = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """The positions of a sequence in the order in which devices hold them.

    ``tokens[:, zigzag_order(length, devices)]``, cut into as many equal parts as there are devices,
    is what `context_attention` expects. ``numpy.argsort`` of the order leads back.

    Args:
      length: S, a multiple of 2 D.
      devices: D.

    Returns:
      int32 [S].

    Raises:
      ValueError, TypeError: for other sizes.
    """
    for name, value in (("length", length), ("devices", devices)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name}={value!r}: expected a whole number")
    if devices < 1 or length < 0 or length % (2 * devices):
        raise ValueError(
            f"length={length}, devices={devices}: expected a length that is a multiple of"
            " 2 * devices; pad the sequence"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return chunks[_chunks_of_devices(devices)].reshape(-1)


def _chunks_of_devices(devices: int) -> np.ndarray:
    first = np.arange(devices)
    return np.stack([first, 2 * devices - 1 - first], axis=1).reshape(-1)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a sequence and their owners, as numbers and as arrays of numbers.

    Attributes:
      layout: "zigzag" or "contiguous".
      devices: D.
      tokens: s.
    """

    layout: Layout
    devices: int
    tokens: int

    @property
    def local(self) -> int:
        """The chunks of a device."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def count(self) -> int:
        """The chunks of the sequence."""
        return self.local * self.devices

    @property
    def size(self) -> int:
        """The tokens of a chunk, c."""
        return self.tokens // self.local

    def numbers(self, device: jax.Array) -> list[jax.Array]:
        """The numbers of a device's chunks, in the order in which it holds them."""
        device = jnp.asarray(device, jnp.int32)
        if self.local == 1:
            return [device]
        return [device, np.int32(2 * self.devices - 1) - device]

    def numbers_by_device(self) -> list[list[int]]:
        """The numbers of every device's chunks."""
        if self.local == 1:
            return [[device] for device in range(self.devices)]
        return [[device, 2 * self.devices - 1 - device] for device in range(self.devices)]

    def positions(self, device: jax.Array) -> jax.Array:
        """The positions of a device's tokens: int32 [s]."""
        return self.positions_of_chunks(self.numbers(device))

    def positions_of_chunks(self, numbers: list[jax.Array]) -> jax.Array:
        """The positions of the tokens of chunks: int32 [len(numbers) * c]."""
        inside = lax.iota(jnp.int32, self.size)
        return lax.concatenate([number * np.int32(self.size) + inside for number in numbers], 0)

    @property
    def order(self) -> np.ndarray:
        """The positions in the order in which devices hold them: int32 [S]."""
        length = self.tokens * self.devices
        if self.local == 1:
            return np.arange(length, dtype=np.int32)
        return zigzag_order(length, self.devices)

    def in_order_of_positions(self, array: jax.Array, dimension: int) -> jax.Array:
        """Tokens in the order of positions, from that in which devices hold them."""
        return self._reordered(array, dimension, np.argsort(_chunks_of_devices(self.devices)))

    def in_order_of_devices(self, array: jax.Array, dimension: int) -> jax.Array:
        """Tokens in the order in which devices hold them, from that of positions."""
        return self._reordered(array, dimension, _chunks_of_devices(self.devices))

    def _reordered(self, array: jax.Array, dimension: int, order: np.ndarray) -> jax.Array:
        if self.local == 1 or self.devices == 1:
            return array
        parts = [
            lax.slice_in_dim(array, int(i) * self.size, (int(i) + 1) * self.size, axis=dimension)
            for i in order
        ]
        return lax.concatenate(parts, dimension)

    def chunks_before(self, window: int | None) -> int:
        """How many chunks before its own the tokens of a chunk attend to, at the most."""
        most = self.count - 1
        return most if window is None else min(most, -(-(window - 1) // max(self.size, 1)))
