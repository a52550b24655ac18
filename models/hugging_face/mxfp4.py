"""Tensors of experts in MXFP4, as gpt-oss is published: numbers of 4 bits in blocks with a scale.

Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, section
5.3.3. The tensor [E, K, N] of a model is two in a file::

    name_blocks    uint8 [E, N, K / 32, 16]    numbers 2 i and 2 i + 1 of a block are the low and
                                               the high 4 bits of byte i
    name_scales    uint8 [E, N, K / 32]        the exponent of the scale, plus 127

All products of a number and a scale are numbers of bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from models.families.config_keys import shown_name

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK, _BIAS = 32, 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)


class Mxfp4Tensor:
    """A tensor that is stored as blocks and scales, in the form of a slice of a safetensors file.

    Args:
      name: its name.
      blocks: the slice of its blocks.
      scales: the slice of their scales.

    Raises:
      ValueError: if these do not fit each other.
    """

    def __init__(self, name: str, blocks: Any, scales: Any):
        self._blocks, self._scales = blocks, scales
        shapes = tuple(blocks.get_shape()), tuple(scales.get_shape())
        dtypes = blocks.get_dtype(), scales.get_dtype()
        if len(shapes[0]) != 4 or shapes[0] != (*shapes[1], _BLOCK // 2) or {*dtypes} != {"U8"}:
            raise ValueError(
                f"{shown_name(name)}: blocks {list(shapes[0])} and scales {list(shapes[1])} of"
                f" {' and '.join(dtypes)}: expected U8, 16 for each block and a scale for each;"
                " download the files again"
            )

    def get_shape(self) -> list[int]:
        """[E, K, N]."""
        experts, columns, blocks = self._scales.get_shape()
        return [experts, blocks * _BLOCK, columns]

    def get_dtype(self) -> str:
        """The dtype of its numbers."""
        return "BF16"

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        """A part, in bfloat16; its blocks alone are read."""
        sizes = self.get_shape()
        whole = (*index, *[slice(None)] * (len(sizes) - len(index)))
        experts, rows, columns = (
            slice(*part.indices(size)[:2]) for part, size in zip(whole, sizes, strict=True)
        )
        first = rows.start // _BLOCK
        blocks = slice(first, max(-(-rows.stop // _BLOCK), first))
        packed = np.asarray(self._blocks[experts, columns, blocks])
        scales = np.asarray(self._scales[experts, columns, blocks]).astype(np.int32) - _BIAS
        halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], _BLOCK)
        numbers = np.ldexp(_NUMBERS[halves], scales[..., None]).astype(ml_dtypes.bfloat16)
        numbers = numbers.reshape(*numbers.shape[:2], numbers.shape[2] * _BLOCK)
        own = slice(rows.start - first * _BLOCK, rows.stop - first * _BLOCK)
        return np.swapaxes(numbers[:, :, own], 1, 2)
