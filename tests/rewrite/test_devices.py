"""Sites are the same for all devices: a laptop's trace has those of a GPU node."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import explain, overlap
from collective_matmul.log import warn_once
from collective_matmul.rewrite import find_sites, transform
from tests.conftest import MeshFactory
from tests.reference import AXIS
from tests.rewrite.forms import FORMS

DEVICES = (
    AbstractDevice("cpu", num_cores=None, platform="cpu"),
    AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu"),
    AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"),
    AbstractDevice("AMD Instinct MI300X", num_cores=304, platform="rocm"),
)


def mesh_of(device: AbstractDevice) -> AbstractMesh:
    return AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=device)


def gathered_weights(x: jax.Array, w: jax.Array) -> jax.Array:
    """On a ring, both operands are transposed: worth it for large arrays on fast links only."""
    return x @ lax.all_gather(w, AXIS, axis=1, tiled=True)


def sharded(mesh: Mesh | AbstractMesh) -> Any:
    specs = (P(AXIS), P(None, AXIS))
    return jax.shard_map(gathered_weights, mesh=mesh, in_specs=specs, out_specs=P(AXIS))


def shapes(size: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size, size), jnp.bfloat16)] * 2


@pytest.mark.parametrize("name", FORMS)
def test_every_device_has_the_same_sites(name: str) -> None:
    """Where they are, and what they are of; not what executes them."""
    program = FORMS[name].program
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.arguments()]
    found = {
        tuple(
            (site.kind, site.source, site.shapes, site.matmuls, site.replaced)
            for site in find_sites(program.sharded(mesh_of(device)))(*arguments)
        )
        for device in DEVICES
    }
    assert len(found) == 1, found


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.device_kind)
def test_transposes_without_gain_are_a_decision(device: AbstractDevice) -> None:
    """The site counts for `require`; where it does not gain, its equations stay."""
    for size in (64, 8192):
        fun = sharded(mesh_of(device))
        (site,) = find_sites(fun)(*shapes(size))
        assert site.replaced and site.decision is not None
        assert site.kept == (site.decision.implementation == "xla")
        traced = str(jax.make_jaxpr(overlap(fun, require=1))(*shapes(size)))
        assert ("all_gather[" in traced) == site.kept
        (line,) = explain(overlap(fun))(*shapes(size)).table(1000).splitlines()[1:2]
        assert ("xla, kept" in line) == site.kept


def test_a_kept_site_computes_the_same(make_mesh: MeshFactory) -> None:
    fun = sharded(make_mesh({AXIS: 2}))
    x, w = np.eye(4, dtype=np.float32), np.arange(16, dtype=np.float32).reshape(4, 4)
    np.testing.assert_array_equal(jax.jit(overlap(fun, require=1))(x, w), w)


def test_a_function_without_shard_map_is_warned_about(
    caplog: pytest.LogCaptureFixture, make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under jax.jit with sharded arrays, the compiler inserts collectives after tracing."""
    monkeypatch.setattr(transform, "warn_once", warn_once.__wrapped__)
    with caplog.at_level(logging.WARNING):
        jax.eval_shape(overlap(jax.jit(lambda x: x @ x)), *shapes(8)[:1])
    (message,) = caplog.messages
    assert "enters no jax.shard_map" in message and "layers.parallelize" in message
    caplog.clear()
    with pytest.raises(ValueError, match=r"require=1: it enters no jax\.shard_map"):
        overlap(lambda x: x @ x, require=1)(np.ones((2, 2), np.float32))
    caplog.clear()
    jax.eval_shape(overlap(sharded(make_mesh({AXIS: 2}))), *shapes(8))
    assert not caplog.messages
