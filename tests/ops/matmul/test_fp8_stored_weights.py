"""The ops with weights in 8 bits that are shards, or were quantized before, against float64.

Results and gradients are those of the quantized whole weights. A frozen weight has no array, so it
has no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import collective_matmul
from collective_matmul import Quantized, prequantize
from tests.conftest import MeshFactory
from tests.covering import covering
from tests.fp8_reference import SHIPPED_RECIPES, Fp8Case
from tests.ops.matmul.ring.test_program_structure import equations
from tests.reference import AXIS, OPS, Comparison, assert_close, poisoned_results
from tests.rewrite.simulator import some_compiled

pytestmark = pytest.mark.usefixtures("strict_dtype_promotion")

#: The axis that shards the weights. Whatever else there is, its devices have alike.
FSDP = "fsdp"


@dataclass(frozen=True)
class StoredCase(Fp8Case):
    """A call of an op with `fp8`, with two weights where the op takes several.

    JAX divides the cotangent of the results by the size of the second axis, which is a power of
    two, so that no rounding changes. The gradients are sums over that axis again.

    Attributes:
      weight_dimension: the dimension of weights that the second axis shards; None: they are whole.
      stored: "array", "prequantized" by `prequantize`, or "frozen" after it.
    """

    weight_dimension: int | None = None
    stored: str = "array"

    @property
    def specs(self) -> tuple[P, tuple[P, ...], tuple[P, ...]]:
        """How x, the weights and the results are laid over the devices."""
        x, ws, ys = super().specs
        if self.weight_dimension is None:
            return x, ws, ys
        gathers = self.op == "all_gather_matmul"
        by_dimension = (
            (P(FSDP, AXIS), P(None, (AXIS, FSDP))) if gathers else (P((AXIS, FSDP)), P(AXIS, FSDP))
        )
        return x, (by_dimension[self.weight_dimension],) * len(ws), ys

    def arrays(self, seed: int = 0) -> tuple[Any, list[Any], list[Any]]:
        """Arrays of a case, where a second weight is larger, so that scales in common show."""
        x, ws, dys = super().arrays(seed)
        return x, [w * np.float32(8**i) for i, w in enumerate(ws)], dys

    def call(self, x: jax.Array, ws: Any) -> tuple[jax.Array, ...]:
        """The op on local arrays, under `shard_map`."""
        keywords: dict[str, Any] = {"fp8": self.fp8}
        if self.weight_dimension is not None:
            keywords |= {"weight_axis_name": FSDP, "weight_dimension": self.weight_dimension}
        if self.stored != "array":
            ws = prequantize(tuple(ws), **keywords)
        if self.stored == "frozen":
            ws = tuple(w.frozen for w in ws)
        keywords["implementation"] = self.implementation
        if self.op == "all_gather_matmul":
            keywords["gather_dimension"] = self.dimension
            return collective_matmul.all_gather_matmul(x, tuple(ws), AXIS, **keywords)
        if self.op == "matmul_reduce_scatter":
            keywords["scatter_dimension"] = self.dimension
        return (getattr(collective_matmul, self.op)(x, ws[0], AXIS, **keywords),)

    def compare(self, mesh: Any, seed: int = 0, run: Any = jax.jit) -> Comparison:
        """Compares as for arrays; gradients of frozen weights are zero."""
        compared = super().compare(mesh, seed, run)
        if self.stored != "frozen":
            return compared
        zeros = tuple(map(np.zeros_like, compared.expected.dws))
        return compared._replace(expected=compared.expected._replace(dws=zeros))


def case_of(op: str, fp8: str, **changes: Any) -> StoredCase:
    """A case whose contractions blocks of 128 do not divide, in either pass."""
    gathers = op == "all_gather_matmul"
    fields: dict[str, Any] = {"implementation": "ring", "dimension": 1, "check_vma": False}
    return StoredCase(
        op=op,
        fp8=fp8,
        devices=2,
        leading=(2, 6),
        contracted=136 if gathers else 272,
        columns=((272,), (16,)) if gathers else ((136,),),
        **fields | changes,
    )


PRODUCT = [
    case_of(op, fp8, implementation=implementation, weight_dimension=dimension, stored=stored)
    for op, fp8, implementation, (dimension, stored) in itertools.product(
        OPS,
        SHIPPED_RECIPES,
        ("xla", "ring"),
        itertools.product((None, 0, 1), ("array", "prequantized", "frozen")),
    )
]


def factors(case: StoredCase) -> dict[str, Any]:
    # Each op with each recipe, sharded and not, quantized before and frozen.
    return {
        "op and recipe": (case.op, case.fp8),
        "implementation": case.implementation,
        "is sharded, stored": (case.weight_dimension is not None, case.stored),
        "op and dimension": (case.op, case.weight_dimension),
    }


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[list[tuple[int, ...]]]:
    with poisoned_results() as shapes:
        yield shapes


@some_compiled(covering(PRODUCT, factors), factors)
def test_matches_quantized_operands(
    case: StoredCase, run: Callable, make_mesh: MeshFactory
) -> None:
    axes = {AXIS: 2} if case.weight_dimension is None else {FSDP: 2, AXIS: 2}
    assert_close(case.compare(make_mesh(axes), run=run))


@pytest.mark.parametrize("weight_dimension", [None, 0])
@pytest.mark.parametrize("op", OPS)
def test_frozen_weights_have_no_gradient(
    op: str, weight_dimension: int | None, make_mesh: MeshFactory
) -> None:
    """Nor is one computed: nothing is co-gathered for it, contracted or scattered."""
    axes = {AXIS: 2} if weight_dimension is None else {FSDP: 2, AXIS: 2}

    def primitives(stored: str) -> list[str]:
        case = case_of(op, "rowwise", stored=stored, weight_dimension=weight_dimension)
        fun, (x, ws, dys) = case.sharded(make_mesh(axes)), case.arrays()

        def gradients(x: Any, ws: Any, dys: Any) -> Any:
            return jax.vjp(fun, x, ws)[1](dys)

        found = equations(jax.make_jaxpr(gradients)(x, tuple(ws), tuple(dys)).jaxpr)
        return [equation.primitive.name for equation in found]

    trained, frozen = primitives("prequantized"), primitives("frozen")
    count = 2 if op == OPS[0] else 1
    assert trained.count("dot_general") - frozen.count("dot_general") == count
    sent = ["ppermute", "reduce_scatter"]
    fewer = sum(trained.count(name) - frozen.count(name) for name in sent)
    # The co-gathered rows of a gather, the array beside the rows of a scatter; terms of each dw.
    assert fewer == (op != OPS[2]) + (0 if weight_dimension is None else count)


def test_the_gradient_of_a_frozen_weight_has_no_array(make_mesh: MeshFactory) -> None:
    x, (w, _), _ = case_of(OPS[0], "rowwise").arrays()

    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        frozen = prequantize(w, "rowwise").frozen

        def product(w: Quantized) -> jax.Array:
            return collective_matmul.all_gather_matmul(
                x, w, AXIS, gather_dimension=1, fp8="rowwise"
            )

        y, transpose = jax.vjp(product, frozen)
        (dw,) = transpose(y)
        assert (dw.array, dw.shape) == (None, frozen.shape)
        return jnp.stack([jnp.any(leaf.astype(jnp.float32) != 0) for leaf in jax.tree.leaves(dw)])

    fun = jax.shard_map(
        gradient,
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(None, AXIS), P(None, AXIS)),
        out_specs=P(AXIS),
    )
    assert not jax.jit(fun)(x, w).any()
