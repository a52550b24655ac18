"""Who moves bytes along mesh axes, for devices of processes and nodes that are not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from collective_matmul import all_gather_matmul, context_attention, expert_mlp, explain, transport
from collective_matmul.dispatch.assessment import assess
from collective_matmul.dispatch.selection import choose
from collective_matmul.dispatch.tables import lookup, table_files
from collective_matmul.dispatch.tables.table import Table
from collective_matmul.mosaic_gpu.peers import shared_memory
from collective_matmul.mosaic_gpu.requirements import workspaces_reason
from collective_matmul.ops.attention.context.request import ContextRequest
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.peer_access import peer_kernels_allowed
from collective_matmul.transport import TRANSPORTS, transport_over
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, tracing_for
from tests.dispatch.tables.example_tables import KIND, entry, layer


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that there are processes, by the number of them on each node, and their devices."""

    def patch(processes_of_nodes: Sequence[int], per_process: int) -> None:
        node_of_process = [node for node, n in enumerate(processes_of_nodes) for _ in range(n)]
        devices = [
            SimpleNamespace(
                id=number,
                process_index=process,
                slice_index=node,
                platform="cpu",
                device_kind="cpu",
            )
            for process, node in enumerate(node_of_process)
            for number in range(process * per_process, (process + 1) * per_process)
        ]
        monkeypatch.setattr(jax, "process_count", lambda: len(node_of_process))
        # Not in the order of their ids.
        monkeypatch.setattr(jax, "devices", lambda: devices[::-1])

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


def test_of_several_axes_the_slowest_counts(pretend: Any) -> None:
    pretend([2, 2], 2)
    sizes = {"d": 2, "f": 2, "t": 2}
    with jax.sharding.use_abstract_mesh(AbstractMesh(tuple(sizes.values()), tuple(sizes))):
        assert transport_over("t", "f") == "nccl"
        assert transport_over(("t", "f"), "d") == "network"
        assert transport_over() == "peer_copies"
        # An axis of `jax.vmap`, of which the mesh knows nothing.
        assert transport_over("of_vmap") == "nccl"


def test_gpus_of_a_process_without_access_communicate_by_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "no_peer_access_reason", lambda: "GPU 0 cannot")
    assert transports({"tensor": 8}) == {"tensor": "nccl"}


SITE = layer(4096)
REQUESTS = [
    SITE,
    ExpertRequest(64, 32, 64, 8, 2, np.dtype("float32"), ("t",), 2, 2),
    ContextRequest(1, 64, 4, 2, 64, np.dtype("float32"), ("t",), 2, scale=0.125),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.op)
def test_tables_keep_transports_apart(request_: Any) -> None:
    flats = {name: dataclasses.replace(request_, transport=name).flat for name in TRANSPORTS}
    assert len(set(flats.values())) == len({flat.kind for flat in flats.values()}) == 3
    measured = {flat: entry(xla=3.0 + n, ring=1.0) for n, flat in enumerate(flats.values())}
    table = Table.from_text(Table(KIND, measured).to_text())
    assert table.entries == measured
    for n, flat in enumerate(flats.values()):
        found = lookup.look_up(flat, "ring", [("here", table)], ["ring"])
        assert found is not None and found.gain == pytest.approx(3.0 + n)
    # As in the files of versions that knew one transport.
    assert "transport" not in flats["peer_copies"].fields()
    with pytest.raises(ValueError, match=r"'pigeons': expected one of peer_copies, nccl, network"):
        type(request_).from_fields(flats["nccl"].fields() | {"transport": "pigeons"})


def chosen(monkeypatch: pytest.MonkeyPatch, name: Any, table: Table | None = None) -> str:
    """The backend of the site on H200, moved by a transport, with a table of measurements."""
    monkeypatch.setattr(table_files, "known", lambda kind: [("here", table)] if table else [])
    with tracing_for(H200):
        return choose(dataclasses.replace(SITE, transport=name)).name


def test_a_ring_through_nccl_is_chosen_by_measurements_of_that_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer, nccl = SITE.flat, dataclasses.replace(SITE, transport="nccl").flat
    assert chosen(monkeypatch, "peer_copies") == "ring"
    for name in ("nccl", "network"):
        assert chosen(monkeypatch, name) == "xla"
        assert chosen(monkeypatch, name, Table(KIND, {peer: entry(xla=2, ring=1)})) == "xla"
    measured = Table(KIND, {peer: entry(xla=1, ring=2), nccl: entry(xla=2, ring=1)})
    assert chosen(monkeypatch, "nccl", measured) == "ring"
    assert chosen(monkeypatch, "peer_copies", measured) == "xla"
    assert chosen(monkeypatch, "network", measured) == "xla"


def test_kernels_that_address_peers_need_no_other_measurements_in_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BACKENDS["one_shot"], "lacking_reason", lambda site: None)
    monkeypatch.setattr(BACKENDS["one_shot"], "unsupported_reason", lambda site: None)
    measured = Table(KIND, {SITE.flat: entry(xla=3, ring=1, one_shot=2)})
    with peer_kernels_allowed(True):
        assert chosen(monkeypatch, "peer_copies", measured) == "ring"
        assert chosen(monkeypatch, "nccl", measured) == "one_shot"
    table = [("here", measured)]
    monkeypatch.setattr(table_files, "known", lambda kind: table)
    with tracing_for(H200), peer_kernels_allowed(True):
        found = assess(dataclasses.replace(SITE, transport="network")).by_name
    assert not found["one_shot"].is_measured


def test_explain_names_the_transport(pretend: Any, make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"t": 8})
    pretend([8], 1)

    def ops(x: jax.Array, w: jax.Array, experts: jax.Array) -> Any:
        q, rows = x[None, :, None], x.shape[0]
        routing = jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1))
        return (
            all_gather_matmul(x, w, "t", implementation="xla"),
            context_attention(q, q, q, "t", implementation="xla"),
            expert_mlp(x, *routing, experts, experts, experts, "t", implementation="xla"),
        )

    sharded = jax.shard_map(ops, mesh=mesh, in_specs=P("t"), out_specs=P("t"), check_vma=False)
    explanation = explain(sharded)(jnp.ones((128, 8)), jnp.ones((64, 8)), jnp.ones((8, 8, 8)))
    assert explanation.table(400).count("t=8 through NCCL") == 3


def test_kernels_that_address_peers_stay_on_a_node(pretend: Any, monkeypatch: Any) -> None:
    """Nodes of the devices of a smaller mesh are not known."""
    monkeypatch.setattr(shared_memory, "unshared_reason", lambda: None)
    pretend([2, 2], 1)
    reasons = {}
    for sizes in ({"data": 2, "tensor": 2}, {"tensor": 4}, {"tensor": 2}):
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        monkeypatch.setattr(jax, "device_count", lambda: 4)
        with jax.sharding.use_abstract_mesh(mesh):
            reasons[mesh.size, len(sizes)] = workspaces_reason(transport_over("tensor"))
    assert reasons[4, 2] is None
    assert str(reasons[4, 1]).startswith("the axis crosses nodes")
    assert str(reasons[2, 1]).startswith("a mesh of 2 of 4 devices on 2 nodes")
