"""An attention layer of a sequence that devices divide, by PyTorch's `context_parallel`.

Legend: S tokens of the sequence, D devices, s = S / D, h features, N heads of size H, K heads of
keys and values.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.pytorch.torch_programs import (
    Failure,
    Measuring,
    Run,
    computed,
    relative_error,
    require_right,
)

#: How keys and values travel, by candidate.
ROTATIONS = {"torch_context_all_gather": "allgather", "torch_context_all_to_all": "alltoall"}
#: Tokens of a sequence that is computed on one device too.
CHECKED_TOKENS = 1024
#: Largest relative error. Rounding to bfloat16 between operators leaves about 0.005.
TOLERANCE = 0.02


class TorchContext:
    """The candidates of one layer.

    Args:
      worker: measures.
      case: name, candidates, tokens, width, heads, key_value_heads, head_size and groups.
      dtype: of everything.
    """

    def __init__(self, worker: Measuring, case: dict[str, Any], dtype: torch.dtype):
        self.worker, self.case, self.place = worker, case, worker.place
        self.mesh = init_device_mesh(self.place.device.type, (self.place.devices,))
        h, size = case["width"], case["head_size"]
        queries, keys = case["heads"] * size, case["key_value_heads"] * size
        self.generator = torch.Generator(self.place.device).manual_seed(0)
        self.dtype = dtype
        shapes = ((queries, h), (keys, h), (keys, h), (h, queries))
        self.weights = [self.draw(*shape, scale=shape[1] ** -0.5) for shape in shapes]

    def draw(self, *shape: int, scale: float) -> Tensor:
        """An array that all devices draw alike."""
        place = {"device": self.place.device, "dtype": self.dtype}
        return torch.randn(shape, generator=self.generator, **place).mul_(scale)

    def layer(self, x: Tensor, *weights: Tensor) -> Tensor:
        """[1, s, h] to [1, s, h]. PyTorch needs heads of keys and values to be repeated here."""
        query, key, value, output = weights
        size, copies = self.case["head_size"], self.case["heads"] // self.case["key_value_heads"]
        heads = [F.linear(x, w).unflatten(-1, (-1, size)) for w in (query, key, value)]
        heads = [heads[0], *(part.repeat_interleave(copies, 2) for part in heads[1:])]
        attended = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in heads), is_causal=True
        )
        return F.linear(attended.transpose(1, 2).flatten(2), output)

    def run_of(self, x: Tensor, dy: Tensor, *, differentiated: bool) -> Run:
        """Computes the result, or it and all gradients."""

        leaves = [array.detach().requires_grad_() for array in (x, *self.weights)]
        return functools.partial(computed, self.layer, leaves, dy if differentiated else None)

    def results(self) -> Iterator[dict[str, Any]]:
        """The results of each candidate, forward and then with gradients."""
        for name in self.case["candidates"]:
            for direction in ("forward", "gradients"):
                result = {"name": f"{self.case['name']} {direction}", "candidate": name}
                result |= {"layer": self.case, "devices": self.place.devices, "options": ""}
                try:
                    result |= self.measured(name, direction)
                except Failure as failure:
                    result["failure"] = str(failure)
                yield result

    def measured(self, name: str, direction: str) -> dict[str, Any]:
        """The times of a candidate, and its error; raises Failure if it fails or is wrong."""
        if self.worker.out_of_time():
            raise Failure("the time was over before its turn")
        differentiated = direction == "gradients"
        set_rotate_method(ROTATIONS[name])
        error = self.worker.largest(self.worker.together(lambda: self.error(differentiated)))
        require_right(error, TOLERANCE, "one device's")
        torch.cuda.reset_peak_memory_stats()
        with self.divided(self.case["tokens"]) as (x, dy):
            run = self.run_of(x, dy, differentiated=differentiated)
            self.worker.together(run)
            samples = self.worker.measure({name: run}, self.case["groups"])[name]
        peak = int(self.worker.largest(torch.cuda.max_memory_allocated()))
        return {"samples": samples, "relative_error": error, "peak_bytes": peak}

    @contextlib.contextmanager
    def divided(self, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """x and dy [1, s, h] of this device, while attention is that of all devices."""
        x, dy = (self.draw(1, tokens, self.case["width"], scale=1.0) for _ in range(2))
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(self.mesh, buffers=[x, dy], buffer_seq_dims=[1, 1]),
        ):
            yield x, dy

    def error(self, differentiated: bool) -> float:
        """The largest relative error of a short sequence's result and gradient of x."""
        state = self.generator.get_state()
        x, dy = (self.draw(1, CHECKED_TOKENS, self.case["width"], scale=1.0) for _ in range(2))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            expected = self.run_of(x, dy, differentiated=differentiated)()[:2]
        chunks = 2 * self.place.devices
        own = (self.place.rank, chunks - 1 - self.place.rank)
        expected = [torch.cat([e.chunk(chunks, 1)[c] for c in own], 1) for e in expected]
        self.generator.set_state(state)
        with self.divided(CHECKED_TOKENS) as (x, dy):
            found = self.run_of(x, dy, differentiated=differentiated)()[:2]
        return relative_error(found, expected)
