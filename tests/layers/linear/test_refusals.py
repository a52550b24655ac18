"""Invalid arguments of the nnx layers are refused with an explanation."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import (
    AttentionProjection,
    ColumnParallelLinear,
    GatedFeedForward,
    RowParallelLinear,
    shared_gather,
)
from tests.conftest import MeshFactory
from tests.layers.reference import random

FEATURES, HEADS, HEAD_DIM, HIDDEN = 12, 4, 3, 16


@pytest.fixture
def mesh(make_mesh: MeshFactory) -> Mesh:
    return make_mesh({"data": 2, "tensor": 4})


def column(**options: Any) -> ColumnParallelLinear:
    return ColumnParallelLinear(FEATURES, HIDDEN, **_with_rngs(options))


def row(**options: Any) -> RowParallelLinear:
    return RowParallelLinear(HIDDEN, FEATURES, **_with_rngs(options))


def _with_rngs(options: dict[str, Any]) -> dict[str, Any]:
    return {"rngs": nnx.Rngs(0), **options}


REFUSED_AT_CONSTRUCTION = {
    "columns": (
        lambda **o: ColumnParallelLinear(4, (6, 2), **o),
        "out_features=(6, 2): 6 is not divisible by axis 'tensor' of size 4; the nearest to it:"
        " 4 or 8",
    ),
    "rows": (
        lambda **o: RowParallelLinear(3, 4, **o),
        "in_features=3: 3 is not divisible by axis 'tensor' of size 4; the nearest to it: 4",
    ),
    "hidden": (lambda **o: GatedFeedForward(4, 6, **o), "hidden_features=6: 6 is not divisible"),
    "heads": (lambda **o: AttentionProjection(4, 6, 2, 3, **o), "num_heads=6: 6 is not divisible"),
    "key value heads": (
        lambda **o: AttentionProjection(4, 24, 6, 3, **o),
        "num_key_value_heads=6: 6 is not divisible",
    ),
    "copies": (
        lambda **o: ColumnParallelLinear(4, (2, 3), copies=3, **o),
        "copies=3: expected the 4 devices of axis 'tensor' over the 2 heads of out_features=(2, 3)",
    ),
    "copies of no heads": (
        lambda **o: ColumnParallelLinear(4, 16, copies=2, **o),
        "copies=2: out_features=16 does not say how many heads it has; pass their number, heads=",
    ),
    "copies of other heads": (
        lambda **o: ColumnParallelLinear(4, 16, heads=2, copies=4, **o),
        "copies=4: expected the 4 devices of axis 'tensor' over the 2 heads of out_features=16",
    ),
    "parts of heads": (
        lambda **o: ColumnParallelLinear(4, 15, heads=2, **o),
        "heads=2: does not divide out_features=15, the features of all heads, one head after the"
        " other; expected a divisor, such as 1, 3, 5, 15",
    ),
    "no heads": (
        lambda **o: ColumnParallelLinear(4, 16, heads=0, **o),
        "heads=0: expected the number of heads, a whole number of at least 1",
    ),
    "other heads": (
        lambda **o: ColumnParallelLinear(4, (2, 3), heads=1, **o),
        "heads=1: the first of out_features=(2, 3) is the number of heads; pass heads=2",
    ),
    "uneven heads": (
        lambda **o: ColumnParallelLinear(4, 9, heads=3, **o),
        "heads=3: axis 'tensor' of size 4 neither divides the heads nor is a multiple of them;"
        " correct the number of heads, or take a smaller axis that fits: 1, 3",
    ),
    "sharded copies": (
        lambda **o: ColumnParallelLinear(4, (2, 3), copies=2, weight_axis_name="fsdp", **o),
        "weight_axis_name='fsdp': kernels with copies=2 are whole on every device",
    ),
    "groups": (
        lambda **o: AttentionProjection(4, 8, 3, 3, **o),
        "num_key_value_heads=3: does not divide num_heads=8",
    ),
    "implementation": (
        lambda **o: column(implementation="rign", **o),
        "implementation='rign': expected None",
    ),
    "axis": (
        lambda **o: column(axis_name="model", **o),
        "axis_name='model': the mesh has the axes ('data', 'tensor'); name one of them",
    ),
}


@pytest.mark.parametrize("name", REFUSED_AT_CONSTRUCTION)
def test_the_constructor_refuses_sizes_that_do_not_fit(name: str, mesh: Mesh) -> None:
    construct, sentence = REFUSED_AT_CONSTRUCTION[name]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        construct(mesh=mesh, rngs=nnx.Rngs(0))


def test_the_constructor_knows_the_mesh_around_it(mesh: Mesh) -> None:
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="out_features=6"):
        ColumnParallelLinear(4, 6, rngs=nnx.Rngs(0))


REFUSED_AT_CALL = {
    "features": (column, random(2, 8, 5), "x: shape (2, 8, 5); expected [..., 12]"),
    "several features": (
        lambda: RowParallelLinear((HEADS, HEAD_DIM), FEATURES, rngs=nnx.Rngs(0)),
        random(2, 8, HEADS * HEAD_DIM),
        "x: shape (2, 8, 12); expected [..., 4, 3]",
    ),
    "gather features": (
        lambda: column(gather_dimension=-1),
        random(2, 8, FEATURES),
        "gather_dimension=-1: there are 2 dimension(s) before the features; expected one from -3"
        " to -2, or from 0 to 1",
    ),
    "scatter too far": (
        lambda: row(scatter_dimension=2),
        random(2, 8, HIDDEN),
        "scatter_dimension=2: there are 2 dimension(s) before the features",
    ),
    "columns": (
        lambda: ColumnParallelLinear(FEATURES, 6, rngs=nnx.Rngs(0)),
        random(2, 8, FEATURES),
        "out_features=6: 6 is not divisible",
    ),
    "rows": (
        lambda: RowParallelLinear((6, 2), FEATURES, rngs=nnx.Rngs(0)),
        random(2, 8, 6, 2),
        "in_features=(6, 2): 6 is not divisible",
    ),
}


@pytest.mark.parametrize("name", REFUSED_AT_CALL)
def test_a_call_with_global_arrays_refuses_shapes_that_do_not_fit(name: str, mesh: Mesh) -> None:
    construct, x, sentence = REFUSED_AT_CALL[name]
    layer = construct()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(sentence)):
        layer(x)


def test_a_call_without_a_mesh_is_refused_with_the_ways_to_give_one() -> None:
    sentence = "axis_name='tensor': there is no mesh here; call the layer inside `with jax.set_mesh"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        column()(random(2, 8, FEATURES))


def test_a_mesh_without_the_axis_is_refused(make_mesh: MeshFactory) -> None:
    layer = column()
    with (
        jax.set_mesh(make_mesh({"data": 2})),
        pytest.raises(ValueError, match=r"axis_name='tensor': the mesh has the axes \('data',\)"),
    ):
        layer(random(2, 8, FEATURES))


@pytest.mark.parametrize("construct", [column, row])
def test_inside_shard_map_a_global_kernel_is_refused(construct: Any, mesh: Mesh) -> None:
    layer = construct()
    graph, state = nnx.split(layer)
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh,
        in_specs=(P(), P(None, "tensor")),
        out_specs=P(None, "tensor"),
    )
    with pytest.raises(ValueError, match=r"kernel: shape .* this device's shard over .* in_specs"):
        call(state, random(2, 8, layer.kernel.shape[0]))


def test_outside_shard_map_a_local_kernel_is_refused(mesh: Mesh) -> None:
    layer = column(mesh=mesh)
    layer.kernel = nnx.Param(layer.kernel[:, :4])
    with pytest.raises(ValueError, match=r"kernel: shape \(12, 4\); expected the global .*12, 16"):
        layer(random(2, 8, FEATURES))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gather_dimension": 0}, "gather_dimension"),
        ({"implementation": "ring"}, "implementation"),
        ({"dtype": jnp.bfloat16}, "dtype"),
        ({"axis_name": "data"}, "axis_name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_differ_cannot_share_a_gather(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"layers: they have {name} .* construct them alike"):
        shared_gather(random(2, 8, FEATURES), [column(), column(**options)])


def test_a_shared_gather_needs_a_layer() -> None:
    with pytest.raises(ValueError, match=r"layers=\[\]: expected at least one"):
        shared_gather(random(2, 8, FEATURES), [])


@pytest.mark.parametrize("features", [0, -8, 8.0, ()])
def test_sizes_of_layers_are_whole_numbers(features: Any) -> None:
    with pytest.raises(ValueError, match=r"out_features=.*: expected a whole number of at least 1"):
        ColumnParallelLinear(8, features, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"in_features=.*: expected a whole number of at least 1"):
        RowParallelLinear(features, 8, rngs=nnx.Rngs(0))


def test_a_sequence_of_backends_is_stored_as_a_tuple() -> None:
    assert column(implementation=["ring", "xla"]).implementation == ("ring", "xla")
    assert row(implementation="ring").implementation == ("ring",)
    assert row().implementation is None
