"""Contents of the programs: permutes and their bytes, no repeated keys, no scores of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from collective_matmul import ATTENTION_CHECKPOINT_NAME, record_decisions
from collective_matmul.ops.attention import flash_attention
from collective_matmul.ops.attention.context import context_cost
from collective_matmul.ops.attention.context.layout import LAYOUTS, Chunks
from collective_matmul.ops.attention.context.pieces import bytes_of_pieces, pieces_of
from collective_matmul.ops.attention.context.request import OP, ContextRequest
from tests.conftest import MeshFactory
from tests.covering import pairwise
from tests.ops.attention.context.parts import NAME, kernel_of_parts
from tests.ops.attention.context.reference import AXIS, ContextCase

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
COLLECTIVES = ("ppermute", "all_gather", "psum_scatter", "reduce_scatter", "all_to_all")
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def traced(case: ContextCase, make_mesh: MeshFactory) -> tuple[list[Any], dict[str, Any]]:
    """All equations of the op with its gradients, and its requests by direction."""
    (query, key, value, _), cotangent = case.arrays()

    def both(query: Any, key: Any, value: Any, ids: Any, cotangent: Any) -> Any:
        attend = case.sharded(make_mesh)
        out, pullback = jax.vjp(lambda *x: attend(*x, ids), query, key, value)
        return out, pullback(cotangent)

    with record_decisions() as decisions:
        jaxpr = jax.make_jaxpr(both)(query, key, value, case.ids(), cotangent)
    requests = {d.site.direction: d.site for d in decisions if d.site.op == OP}
    return list(equations(jaxpr.jaxpr)), requests


def bytes_of(array: Any) -> int:
    return array.aval.size * np.dtype(array.aval.dtype).itemsize


def sent(found: list[Any]) -> list[int]:
    return [bytes_of(e.invars[0]) for e in found if e.primitive.name == "ppermute"]


def ids_bytes(request: ContextRequest) -> int:
    return (request.axis_size - 1) * request.bytes_of_ids


@pairwise(implementation=["gather", "ring", "ulysses"], devices=[2, 3, 4], layout=LAYOUTS)
def test_bytes_that_permutes_send_are_those_of_the_formulas(
    implementation: str, devices: int, layout: str, make_mesh: MeshFactory
) -> None:
    case = ContextCase(
        devices=devices,
        layout=layout,
        implementation=implementation,
        queries=4 * devices,
        key_value_heads=12,
        dtype="bfloat16",
        segments=devices == 3,
    )
    found, requests = traced(case, make_mesh)
    forward, backward = requests["forward"], requests["backward"]
    if implementation == "ulysses":
        expected = sum(context_cost.bytes_of_exchanges(r) + ids_bytes(r) for r in requests.values())
    else:
        expected = forward.bytes_communicated + backward.bytes_communicated
    assert sum(sent(found)) == expected
    names = [e.primitive.name for e in found]
    assert not any(name in names for name in COLLECTIVES[1:])
    if implementation == "gather":
        # One message to each other device: keys and values, and back their gradients.
        messages = 3 + (2 if case.segments else 0)
        assert len(sent(found)) == messages * (devices - 1)


@pytest.mark.parametrize(
    ("layout", "window", "travelling"),
    [
        ("contiguous", 1, 0),
        ("contiguous", 2, 1),
        ("contiguous", 9, 1),
        ("contiguous", 10, 2),
        ("contiguous", 500, 3),
        # Early chunks from the device before, late ones from the device after.
        ("zigzag", 5, 2),
        # Two chunks back on either side, and over the middle.
        ("zigzag", 6, 5),
        ("zigzag", 500, 6),
    ],
)
def test_windows_send_the_neighbours_that_are_needed(
    layout: Any, window: int, travelling: int, make_mesh: MeshFactory
) -> None:
    case = ContextCase(
        devices=4, layout=layout, queries=32, window=window, implementation="gather", groups=1
    )
    found, requests = traced(case, make_mesh)
    request = requests["forward"]
    assert sum(1 for piece in pieces_of(request) if piece.offset) == travelling
    assert bytes_of_pieces(request) == travelling * request.bytes_of_keys // request.chunks.local
    assert sum(sent(found)) == 3 * bytes_of_pieces(request)


@pairwise(implementation=["gather", "ring"], devices=[2, 3, 4], layout=LAYOUTS)
def test_blocks_are_as_many_as_each_device_needs(
    implementation: str, devices: int, layout: str, make_mesh: MeshFactory
) -> None:
    """A zigzag device attends to 2 D - 1 whole blocks of c x c and two halves, and to no more."""
    case = ContextCase(
        devices=devices,
        layout=layout,
        implementation=implementation,
        queries=8 * devices,
        batch=1,
        size=17,
    )
    (query, key, value, _), _ = case.arrays()
    jaxpr = jax.make_jaxpr(case.sharded(make_mesh))(query, key, value, None)
    scores = sum(
        equation.outvars[0].aval.size
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "dot_general"
        and case.size not in equation.outvars[0].aval.shape
    )
    size = case.queries // devices // Chunks(layout, devices, 8).local  # type: ignore[arg-type]
    blocks = 2 * devices + 2 if layout == "zigzag" else devices
    # XLA's causal call has the block beyond the diagonal too.
    assert scores == blocks * size * size * case.heads


@pytest.mark.parametrize("mask", [{}, {"segments": True}, {"window": 5}], ids=str)
@every_layout
def test_flash_attention_attends_by_one_call(
    layout: str, mask: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call in each pass, 2 D + 1 chunks of keys, and nothing of [S, S] or of repeated heads."""
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: None)
    devices, tokens = 4, 24
    case = ContextCase(
        devices=devices,
        layout=layout,
        implementation="gather",
        kernel="flash3",
        queries=devices * tokens,
        dtype="bfloat16",
        groups=4,
        **mask,
    )
    mesh: Any = AbstractMesh((devices,), (AXIS,), (AxisType.Auto,), abstract_device=H100)
    found, _ = traced(case, lambda sizes: mesh)
    calls = [e for e in found if e.primitive.name == "ffi_call"]
    assert len(calls) == 2
    keys = calls[0].invars[1].aval
    if not mask:
        chunks = 2 * devices + 1 if layout == "zigzag" else devices
        size = tokens // 2 if layout == "zigzag" else tokens
        assert keys.shape == (case.batch * chunks * size, case.key_value_heads, case.size)
    for equation in found:
        for result in equation.outvars:
            shape = getattr(result.aval, "shape", ())
            if shape[-2:] == (case.heads, case.size):
                assert result.aval.size <= case.batch * case.queries * case.heads * case.size
            assert sum(n >= tokens for n in shape) < 3 or case.segments


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION_CHECKPOINT_NAME),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_saved_attention_is_not_computed_again(policy: str, make_mesh: MeshFactory) -> None:
    """Under the policy that saves its name, nothing is gathered or attended to twice."""
    case = ContextCase(devices=3, queries=12, implementation="gather", kernel=NAME)
    (query, key, value, _), cotangent = case.arrays()
    attend = case.sharded(make_mesh)

    def loss(*operands: Any) -> jax.Array:
        local = jax.checkpoint(lambda *x: attend(*x, None), policy=POLICIES[policy])
        return (local(*operands) ** 2 * cotangent).sum()

    with kernel_of_parts():
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(query, key, value)
    found = list(equations(jaxpr.jaxpr))
    scores = [e for e in found if e.primitive.name == "exp" and e.outvars[0].aval.ndim == 5]
    # Forward and backward gather, and gradients come home; else the forward gathers again.
    again = policy == "nothing"
    assert len(sent(found)) == (4 if again else 3) * (case.devices - 1)
    # The forward computes weights and their sum.
    assert len(scores) == (5 if again else 3)
