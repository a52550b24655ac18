"""Ops inside branches and loops, where groups of the mesh may disagree on how often they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, collective_einsum
from collective_matmul.dispatch.recording import force_retrace, record_decisions
from collective_matmul.dispatch.selection import UnsupportedSiteError
from collective_matmul.log import warn_once
from tests.conftest import MeshFactory
from tests.dispatch.tables.example_tables import measure_as

X, W = np.ones((4, 8), "float32"), np.ones((8, 4), "float32")
NOTHING = np.zeros((4, 4), "float32")


def in_cond(op: Callable) -> Callable:
    def body(x: Any, w: Any) -> Any:
        return lax.cond(x[0, 0] > 0, jax.jit(op), lambda x, w: jnp.zeros_like(NOTHING), x, w)

    return body


def in_switch(op: Callable) -> Callable:
    return lambda x, w: lax.switch(
        lax.axis_index("d"), (op, lambda x, w: jnp.zeros_like(NOTHING)), x, w
    )


def in_while(op: Callable) -> Callable:
    def body(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, x[0, 0].astype(int), lambda i, y: op(x, w), jnp.zeros_like(NOTHING))

    return body


def in_scan(op: Callable) -> Callable:
    return lambda x, w: lax.scan(lambda y, _: (op(x, w), None), jnp.zeros_like(NOTHING), length=2)[
        0
    ]


divergent = pytest.mark.parametrize("around", [in_cond, in_switch, in_while])
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _ring_is_fastest(monkeypatch: Patch) -> Iterator[None]:
    measure_as(monkeypatch, {"xla": 2e-6, "ring": 1e-6})
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.fixture
def decide(make_mesh: MeshFactory) -> Callable[..., list[str]]:
    """Traces an op inside a loop or a branch, with its gradients, and names the backends chosen."""

    def backends(around: Callable, op: Callable, **sizes: int) -> list[str]:
        fun = jax.shard_map(
            around(op),
            mesh=make_mesh({"t": 2, **sizes}),
            in_specs=(P("t"), P()),
            out_specs=P(None, "t"),
            check_vma=False,
        )
        differentiated = around is not in_while  # Loops have no reverse mode.
        loss = jax.grad(lambda x, w: fun(x, w).sum()) if differentiated else fun
        with force_retrace(), record_decisions() as decisions:
            jax.make_jaxpr(loss)(X, W)
        return sorted({decision.implementation for decision in decisions})

    return backends


def gather(implementation: Any = None) -> Callable:
    return lambda x, w: all_gather_matmul(x, w, "t", implementation=implementation)


@divergent
def test_no_ring_is_chosen_where_groups_may_disagree(
    around: Callable, decide: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    assert decide(around, gather(), d=2) == ["xla"]
    assert "ring is not possible: devices along 'd' may take different branches" in caplog.text
    assert decide(around, gather(("ring", "xla")), d=2) == ["xla"]


def test_rings_where_all_devices_agree(decide: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """In one group, with one device on the other axes, and in loops of a fixed length."""
    assert decide(in_cond, gather()) == ["ring"]
    assert decide(in_cond, gather(), d=1) == ["ring"]
    assert decide(in_scan, gather(), d=2) == ["ring"]
    assert caplog.text == ""


@divergent
def test_a_ring_requested_by_name_is_the_callers_word(
    around: Callable, decide: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    assert decide(around, gather("ring"), d=2) == ["ring"]
    assert "all_gather_matmul hangs with 'ring' unless all devices agree" in caplog.text


def test_a_sequence_of_rings_is_refused(decide: Callable) -> None:
    with pytest.raises(UnsupportedSiteError, match="devices along 'd' may take different branches"):
        decide(in_cond, gather(("ring", "ring_direct")), d=2)


def test_einsums(decide: Callable) -> None:
    def einsum(x: Any, w: Any) -> Any:
        return collective_einsum("mk,kn->mn", x, w, "t", gather="m")

    assert decide(in_cond, einsum, d=2) == ["xla"]
    assert decide(in_scan, einsum, d=2) == ["ring"]
