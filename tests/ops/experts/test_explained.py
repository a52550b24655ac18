"""Lines of `explain` on expert ops and on their grouped matmuls, and refusals by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import expert_mlp, explain, record_decisions
from collective_matmul.dispatch.selection import UnsupportedSiteError, choose
from collective_matmul.ops.experts.request import OP, ExpertRequest
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, tracing_for
from tests.ops.experts.reference import Case

SIZES: Any = {"tokens": 6, "width": 8, "hidden": 12, "local_experts": 3}
CASE = Case({"expert": 2}, None, None, **SIZES)


def lines_of(fun: Callable, *args: Any) -> list[str]:
    return explain(fun)(*args).table(1000).splitlines()


def test_each_pass_and_each_grouped_matmul_has_a_line(make_mesh: MeshFactory) -> None:
    lines = lines_of(CASE.program(make_mesh({"expert": 2})), CASE.arrays())
    passes = [line for line in lines if "expert_mlp" in line or "experts of" in line]
    shapes = r"float32 \[6, 8\] to 2 of 6 experts of \[8, 12\] over expert=2"
    assert len([line for line in passes if re.search(shapes, line)]) == 2
    assert sum(" backward " in line and "decides" not in line for line in passes) == 1
    assert any("the backward pass decides for both" in line for line in passes)
    # A device has room for all pairs of 2 · 6 tokens and their 2 experts.
    assert any(re.search(r"float32 \[24, 8\] @ \[3, 8, 12\] in 3 groups", line) for line in lines)
    assert any(re.search(r"float32 \[24, 8\]ᵀ float32 \[24, 12\] in 3 groups", x) for x in lines)
    assert not any(re.search(r"\bNone\b", line) for line in lines)
    assert not any(line.startswith("0×") for line in lines)


def test_totals_keep_grouped_matmuls_apart_from_what_is_hidden() -> None:
    """XLA's take many times as long, which is no gain of overlap."""
    sizes: Any = {"tokens": 4096, "width": 2048, "hidden": 768, "local_experts": 16}
    case = Case({"expert": 2}, None, None, dtype="bfloat16", **sizes)
    mesh: Any = AbstractMesh((2,), ("expert",), axis_types=(AxisType.Auto,), abstract_device=H200)
    explained = explain(case.program(mesh), peer_kernels=False)(case.arrays())
    gains = {
        what: float(gain)
        for what, gain in re.findall(
            r"^\d+ runs of ([\w ]+); of .* \(([\d.]+)×\)$", explained.table(1000), re.MULTILINE
        )
    }
    grouped = "grouped_matmul and grouped_weight_gradient"
    assert gains.keys() == {"collective matmuls", grouped}
    assert gains["collective matmuls"] < 2 < gains[grouped]
    assert "which multiplies all rows by the matrices of all groups (" in str(explained.table(1000))
    assert explained.table(1000).count("they communicate for") == 1


def test_on_a_cpu_the_reference_is_used_and_the_reason_says_why(make_mesh: MeshFactory) -> None:
    decisions = explain(CASE.program(make_mesh({"expert": 2})))(CASE.arrays()).decisions
    assert {d.implementation for d in decisions} == {"xla"}
    forward = [d for d in decisions if d.site.op == OP]
    assert forward[-1].reason == "on cpu nothing runs under a matmul"


def chosen(devices: int, tokens: int, direction: Any = "forward") -> str:
    """The backend that models choose on H200, at the sizes of Qwen3-30B-A3B."""
    request = ExpertRequest(
        tokens, 2048, 768, 128, 8, np.dtype(jnp.bfloat16), (), devices, devices, direction=direction
    )
    with tracing_for(H200), record_decisions():
        return choose(request).name


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_many_tokens_travel_under_the_products(direction: str) -> None:
    assert chosen(2, 16384, direction) == "ring_direct"


def test_few_tokens_are_gathered() -> None:
    """A ring's copies and kernels would cost more than they hide."""
    assert chosen(8, 8) == "xla"


def test_a_backend_that_cannot_is_refused_by_name(make_mesh: MeshFactory) -> None:
    with jax.enable_x64(True):
        case = Case({"expert": 2}, "ring", "triton", dtype="float64", check_vma=False)
        program = case.program(make_mesh({"expert": 2}))
        sentence = "grouped_implementation='triton': its kernels multiply no float64; for grouped_"
        with pytest.raises(UnsupportedSiteError, match=f"^{sentence}"):
            jax.make_jaxpr(program)(case.arrays())


def test_rings_are_refused_in_a_branch_that_devices_may_not_take_alike(
    make_mesh: MeshFactory,
) -> None:
    """Along another axis: permutes wait for all devices of the program."""
    case = Case({"expert": 2}, ("ring", "xla"), tokens=2)
    arrays = case.arrays()

    def local(flag: jax.Array, *args: Any) -> jax.Array:
        def taken(*args: Any) -> jax.Array:
            return expert_mlp(*args, axis_name="expert", implementation=("ring", "xla"))

        return lax.cond(flag[0] > 0, taken, lambda x, *_: x, *args)

    tokens, matrices = P("expert"), P("expert")
    mapped = jax.shard_map(
        local,
        mesh=make_mesh({"data": 2, "expert": 2}),
        in_specs=(P("data"), *(tokens,) * 3, *(matrices,) * 3),
        out_specs=P(("data", "expert")),
        check_vma=False,
    )
    with record_decisions() as decisions:
        jax.make_jaxpr(mapped)(np.zeros(2), *arrays[:-1])
    (decision,) = [d for d in decisions if d.site.op == OP]
    assert decision.implementation == "xla"
    assert "devices along 'data' may take different branches" in decision.reason


def test_names_are_tried_in_order(make_mesh: MeshFactory) -> None:
    with record_decisions() as decisions:
        case = Case({"expert": 2}, ("ring_two_way", "xla"), ("xla", "triton"))
        jax.make_jaxpr(case.sharded(make_mesh({"expert": 2})))(*case.arrays()[:6])
    assert {(d.site.op, d.implementation) for d in decisions} == {
        (OP, "ring_two_way"),
        ("grouped_matmul", "xla"),
    }
    assert {d.reason for d in decisions} == {"requested"}
