"""Who moves bytes along mesh axes, for devices of processes and nodes that are not there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, compiler, explain, hardware, overlap_jit, transport
from collective_matmul.data import Run
from collective_matmul.dispatch import lookup
from collective_matmul.dispatch.table import Entry, Table
from collective_matmul.hardware import (
    HOPPER,
    NETWORK_LATENCY_VARIABLE,
    NETWORK_RATE_VARIABLE,
    network,
)
from collective_matmul.mosaic_gpu import device
from collective_matmul.mosaic_gpu.device import Sharing
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.ring import cost
from collective_matmul.ops.matmul.xla import xla_seconds
from collective_matmul.schedule import walk
from collective_matmul.transport import TRANSPORTS, shares_node, symmetric_buffers, transport_over
from collective_matmul.xla_options import PERMUTE_MODE, SYMMETRIC_BUFFERS
from tests.dispatch.sites import H200
from tests.hopper import _for_hopper as _for_hopper


def devices_of(processes_of_nodes: Sequence[int], per_process: int) -> list[Any]:
    """Devices, not in the order of their ids, from the number of processes of each node."""
    node_of_process = [node for node, n in enumerate(processes_of_nodes) for _ in range(n)]
    devices = [
        SimpleNamespace(
            id=process * per_process + i,
            process_index=process,
            slice_index=node,
            platform="cpu",
        )
        for process, node in enumerate(node_of_process)
        for i in range(per_process)
    ]
    return devices[::-1]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that there are processes, by the number of them on each node, and their devices."""

    def patch(processes_of_nodes: Sequence[int], per_process: int) -> None:
        devices = devices_of(processes_of_nodes, per_process)
        monkeypatch.setattr(jax, "process_count", lambda: sum(processes_of_nodes))
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "local_device_count", lambda: per_process)

    return patch


def transports(sizes: dict[str, int]) -> dict[str, str]:
    """The transport over each axis of a mesh."""
    with jax.sharding.use_abstract_mesh(AbstractMesh(tuple(sizes.values()), tuple(sizes))):
        return {axis: transport_over(axis) for axis in sizes}


@pytest.mark.parametrize(
    ("nodes", "per_process", "sizes", "expected"),
    [
        ([1, 1], 4, {"data": 2, "tensor": 4}, {"data": "network", "tensor": "peer_copies"}),
        ([2], 4, {"data": 2, "tensor": 4}, {"data": "nccl", "tensor": "peer_copies"}),
        ([2], 4, {"data": 4, "tensor": 2}, {"data": "nccl", "tensor": "peer_copies"}),
        ([2], 4, {"data": 1, "tensor": 8}, {"data": "peer_copies", "tensor": "nccl"}),
        ([2], 4, {"tensor": 4, "data": 2}, {"tensor": "nccl", "data": "peer_copies"}),
        ([8, 8], 1, {"data": 2, "tensor": 8}, {"data": "network", "tensor": "nccl"}),
        ([8, 8], 1, {"data": 8, "tensor": 2}, {"data": "network", "tensor": "nccl"}),
        ([4, 4], 2, {"d": 2, "f": 4, "t": 2}, {"d": "network", "f": "nccl", "t": "peer_copies"}),
        # Of a mesh of some devices nobody knows which they are.
        ([2], 4, {"tensor": 4}, {"tensor": "nccl"}),
        ([1], 8, {"data": 2, "tensor": 4}, {"data": "peer_copies", "tensor": "peer_copies"}),
    ],
)
def test_each_axis_has_its_transport(
    nodes: list[int],
    per_process: int,
    sizes: dict[str, int],
    expected: dict[str, str],
    pretend: Any,
) -> None:
    pretend(nodes, per_process)
    assert transports(sizes) == expected
    with symmetric_buffers(True):
        symmetric = {
            axis: "nccl_symmetric" if name == "nccl" else name for axis, name in expected.items()
        }
        assert transports(sizes) == symmetric


def test_of_several_axes_the_slowest_counts(pretend: Any) -> None:
    pretend([2, 2], 2)
    sizes = {"d": 2, "f": 2, "t": 2}
    with jax.sharding.use_abstract_mesh(AbstractMesh(tuple(sizes.values()), tuple(sizes))):
        assert transport_over("t", "f") == "nccl"
        assert transport_over(("t", "f"), "d") == "network"
        assert transport_over() == "peer_copies"


def test_gpus_of_a_process_without_access_communicate_by_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "no_peer_access_reason", lambda: "GPU 0 cannot")
    assert transports({"tensor": 8}) == {"tensor": "nccl"}


@pytest.mark.parametrize(
    ("nodes", "per_process", "permutes", "symmetric"),
    [([1], 8, True, False), ([2], 1, False, True), ([2], 4, True, True), ([1, 1], 8, True, False)],
)
def test_options_follow_processes(
    nodes: list[int], per_process: int, permutes: bool, symmetric: bool, pretend: Any
) -> None:
    pretend(nodes, per_process)
    options = compiler._options({})
    assert (PERMUTE_MODE in options) == permutes
    assert (options.get(SYMMETRIC_BUFFERS) is True) == symmetric
    assert options["xla_gpu_dot_merger_threshold_mb"] == "0"
    assert compiler._options({SYMMETRIC_BUFFERS: False})[SYMMETRIC_BUFFERS] is False


def test_nvlink_multicast_stays_as_the_environment_says(
    pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    pretend([2], 1)
    assert not any("nvls" in name.lower() for name in compiler._options({}))
    overlap_jit(lambda x: x + 1).trace(jnp.ones(2))
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("users", [None, {SYMMETRIC_BUFFERS: False}])
def test_what_is_traced_knows_whether_nccl_has_symmetric_buffers(
    users: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "shares_node", lambda devices: True)
    seen = []

    def fun(x: jax.Array) -> jax.Array:
        seen.append(symmetric_buffers.value)
        return x + 1

    overlap_jit(fun, compiler_options=users)(jnp.ones(2)).block_until_ready()
    overlap_jit(fun, compiler_options=users).lower(jnp.ones(2))
    assert set(seen) == {users is None}
    assert symmetric_buffers.value is False


def test_nodes_are_shared_by_processes_of_one_node() -> None:
    assert not shares_node(devices_of([1, 1], 8))
    assert shares_node(devices_of([2], 1))
    assert shares_node(devices_of([1, 2], 4))
    assert not shares_node(jax.devices())


SITE = Site("all_gather_matmul", (((1024, 4096), (4096, 7168)),), jnp.dtype("bfloat16"), "t", 2)
EXPERTS = ExpertRequest(64, 32, 64, 8, 2, np.dtype("float32"), ("t",), 2, 2)


@pytest.mark.parametrize("request_", [SITE, EXPERTS], ids=["matmul", "experts"])
def test_tables_keep_transports_apart(request_: Any) -> None:
    flats = {name: dataclasses.replace(request_, transport=name).flat for name in TRANSPORTS}
    assert len(set(flats.values())) == len({flat.kind for flat in flats.values()}) == 4
    for flat in flats.values():
        assert type(flat).from_fields(flat.fields()) == flat
    assert "transport" not in flats["peer_copies"].fields()
    fields = flats["nccl"].fields() | {"transport": "pigeons"}
    with pytest.raises(ValueError, match="pigeons"):
        type(request_).from_fields(fields)
    table = Table(
        "GPU",
        {
            flats["peer_copies"]: Entry(
                {"xla": 2.0, "ring": 1.0}, Run("2026-11-26", "0.11.2", "2 GPUs")
            )
        },
    )
    found = lookup.look_up(flats["nccl"], "ring", [("here", table)], ["ring"])
    assert found is None


def gain(m: int, transport: str) -> tuple[float, float]:
    """The gain of a ring over XLA in a gather of 8B widths on 2 devices, and its error."""
    operands = (((m // 2, 4096), (4096, 7168)),)
    site = dataclasses.replace(SITE, operands=operands, transport=transport)
    prediction = cost.predict(site)
    assert prediction is not None
    return xla_seconds(site) / prediction.seconds, prediction.relative_error


def test_rings_through_nccl_win_with_many_rows_and_symmetric_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "traced_device", lambda: H200)
    for m in (2048, 8192):
        gained, error = gain(m, "nccl_symmetric")
        assert gained - 1 > error
    for m, name in ((512, "nccl_symmetric"), (2048, "nccl"), (8192, "nccl"), (8192, "network")):
        gained, error = gain(m, name)
        assert gained - 1 < error
    # Copies between peers hide more.
    assert gain(8192, "peer_copies")[0] > gain(8192, "nccl_symmetric")[0]


def test_the_network_is_as_its_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NETWORK_RATE_VARIABLE, "90")
    monkeypatch.setenv(NETWORK_LATENCY_VARIABLE, "12.5")
    assert network() == pytest.approx((90e9, 12.5e-6))
    rates = HOPPER.over("network")
    assert (rates.link_bytes, rates.collective_seconds) == network()
    for text in ("0", "-1", "fast", "inf", "nan"):
        monkeypatch.setenv(NETWORK_RATE_VARIABLE, text)
        with pytest.raises(ValueError, match=f"{NETWORK_RATE_VARIABLE}='{text}'"):
            network()


def test_products_beside_nccl_leave_multiprocessors_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(walk, "transport_over", lambda *axes: "nccl_symmetric")
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def ring(x: jax.Array) -> jax.Array:
        gather = walk.Gather(x, "one_way", "t", 0)

        def multiply(*args: Any) -> jax.Array:
            seen.append(device.sharing.value)
            return x

        return walk.walk_gather(gather, multiply, (), None)

    jax.eval_shape(jax.shard_map(ring, mesh=mesh, in_specs=P("t"), out_specs=P("t")), jnp.ones(4))
    assert seen == [walk.SHARING["nccl_symmetric"]] * 2
    assert device.sharing.value == Sharing()


def test_a_kernel_beside_communication_has_fewer_multiprocessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "target", lambda: device.Target(132))
    assert device.sharing_target() == device.Target(132)
    with device.sharing(Sharing(left=16)):
        assert device.sharing_target() == device.Target(116)


def test_explain_names_the_transport(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((8,), ("t",), axis_types=(AxisType.Auto,))
    x, w = jnp.ones((16, 8)), jnp.ones((8, 16))
    pretend([8], 1)
    monkeypatch.setattr(jax, "process_count", lambda: 8)

    def fun(x: jax.Array, w: jax.Array) -> jax.Array:
        specs = {"in_specs": (P("t"), P(None, "t")), "out_specs": P(None, "t")}
        return jax.shard_map(
            lambda x, w: all_gather_matmul(x, w, "t", implementation="xla"), mesh=mesh, **specs
        )(x, w)

    assert "over t=8 through NCCL with symmetric buffers" in explain(fun)(x, w).table(400)


@pytest.mark.usefixtures("_for_hopper")
@pytest.mark.parametrize(
    ("sharing", "kernels"),
    [(Sharing(), True), (Sharing(left=16), True), (Sharing(left=16, by_xla=True), False)],
)
def test_chunks_beside_nccl_are_multiplied_as_their_transport_says(
    sharing: Sharing, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(walk.SHARING, "peer_copies", sharing)
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P("t"), P(None, "t")), "out_specs": P(None, "t")}

    def gather(x: jax.Array, w: jax.Array) -> jax.Array:
        return all_gather_matmul(x, w, "t", implementation="ring")

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 512))]
    traced = jax.jit(jax.shard_map(gather, mesh=mesh, **specs)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == kernels
    assert ("dot_general" in text) != kernels
