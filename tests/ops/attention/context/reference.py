"""`context_attention` on simulated devices, beside dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from collective_matmul import context_attention, zigzag_order
from tests.ops.attention.reference import SEGMENTS, Attended, AttentionCase

AXIS = "context"


@dataclass(frozen=True)
class ContextCase(AttentionCase):
    """A call of `context_attention`; `queries` are the tokens of the whole sequence.

    Attributes:
      devices: D.
      layout: which tokens a device has.
      kernel: the argument `attention_implementation`.
      check_vma: whether `shard_map` checks over which axes values vary.
    """

    devices: int = 2
    layout: str = "zigzag"
    kernel: str | None = None
    check_vma: bool = True

    def __str__(self) -> str:
        masks = f"window{self.window}" if self.window else "causal" if self.causal else "full"
        documents = "-documents" if self.segments else ""
        heads = f"{self.heads}of{self.key_value_heads}"
        return (
            f"{self.implementation}-{self.kernel}-{self.devices}-{self.layout}-{masks}{documents}"
            f"-{self.queries}x{heads}x{self.size}-{self.dtype}"
        )

    @property
    def order(self) -> np.ndarray:
        """The positions in the order in which devices hold them."""
        if self.layout == "contiguous":
            return np.arange(self.queries)
        return zigzag_order(self.queries, self.devices)

    def local(self, *operands: Any, ids: Any = None, sinks: Any = None) -> jax.Array:
        """The op, inside `shard_map`."""
        query, key, value = operands
        options: dict[str, Any] = {}
        if ids is not None:
            options = {"segment_ids": ids, "max_segments": SEGMENTS}
        return context_attention(
            query,
            key,
            value,
            AXIS,
            causal=self.causal,
            layout=self.layout,  # type: ignore[arg-type]
            window=self.window,
            scale=self.scale,
            sinks=sinks if self.sinks else None,
            implementation=self.implementation,
            attention_implementation=self.kernel,
            **options,
        )

    def sharded(self, make_mesh: Callable) -> Callable:
        """The op on arrays in the order of the devices: of query, key, value and ids; and
        sinks, if the case has them."""
        spec = P(None, AXIS)

        def local(query: Any, key: Any, value: Any, ids: Any, sinks: Any) -> jax.Array:
            return self.local(query, key, value, ids=ids, sinks=sinks)

        mapped = jax.shard_map(
            local,
            mesh=make_mesh({AXIS: self.devices}),
            in_specs=(spec, spec, spec, spec, P()),
            out_specs=spec,
            check_vma=self.check_vma,
        )
        return lambda query, key, value, ids, sinks=None: mapped(query, key, value, ids, sinks)

    def run_on(
        self, make_mesh: Callable, seed: int = 0, jit: Callable = jax.jit, times: int = 1
    ) -> list[Attended]:
        """The result and the gradients in the order of positions, of each run of one program."""
        (*operands, sinks), cotangent = self.arrays(seed)
        given = [sinks] if self.sinks else []
        attend, order, back = self.sharded(make_mesh), self.order, np.argsort(self.order)

        def both(operands: Any, ids: Any, cotangent: Any) -> tuple:
            out, pullback = jax.vjp(lambda *x: attend(*x[:3], ids, *x[3:]), *operands)
            return out, *pullback(cotangent)

        # Tokens change places on the host: gathers and their gradients take long to compile.
        arrays = jax.tree.map(lambda x: x[:, order], (operands, self.ids(seed), cotangent))
        arrays = [*arrays[0], *given], *arrays[1:]
        program = jit(both)
        runs = [jax.device_get(program(*arrays)) for _ in range(times)]
        # Without sinks there are no gradients of them.
        none = [] if given else [np.zeros_like(sinks)]
        return [Attended(*(x[:, back] for x in run[:4]), *run[4:], *none) for run in runs]

    def check_on(self, make_mesh: Callable, seed: int = 0, *, repeats: bool = False) -> None:
        """Compares with dense attention; with `repeats`, a second run bit for bit too."""
        first, *others = self.run_on(make_mesh, seed, times=1 + repeats)
        self.check(first, seed)
        for again in others:
            for one, other in zip(first, again, strict=True):
                np.testing.assert_array_equal(one, other)
