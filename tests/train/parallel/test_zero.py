"""ZeRO: what is sharded over the fsdp axis, and how gradients are summed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from models.parameters.use import used
from tests.ops.matmul.ring.test_program_structure import equations
from train.config import presets
from train.config.checks import check
from train.config.config import Config, MeshConfig, MeshSizes
from train.memory import step_memory
from train.memory.step_memory import Memory, advice, memory_of
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import state_on_mesh
from train.parallel.batches import abstract_batch
from train.parallel.mesh import make_abstract_mesh, mesh_sizes
from train.parallel.model import ModelFunctions
from train.parallel.parameter_shards import ZeroUse, sharded_dimension, sharded_spec, sum_over
from train.parallel.zero import describe_zero
from train.step import sharded_step

TINY = dataclasses.replace(
    presets.debug(),
    model=dataclasses.replace(presets.debug().model, num_layers=1),
    batch_size=8,
    sequence_length=16,
    overlap="xla",
)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        # A column-parallel kernel, a row-parallel one, an embedding: the residual stream's width.
        ((128, 16, 8), P(None, "tensor"), P("fsdp", "tensor", None)),
        ((16, 8, 128), P("tensor"), P("tensor", None, "fsdp")),
        ((256, 128), P("tensor", None), P("tensor", "fsdp")),
        # The larger one of two; the first one of two as large.
        ((64, 128), P(None, None), P(None, "fsdp")),
        ((128, 128), P(None, None), P("fsdp", None)),
        # A dimension that tensor shards too, where no other can be divided.
        ((130, 32), P(None, "tensor"), P(None, ("tensor", "fsdp"))),
        # 8 over tensor=2 leaves 4 rows, which fsdp=8 does not divide.
        ((130, 8), P(None, "tensor"), P(None, "tensor")),
        ((128,), P(None), P(None)),
    ],
)  # fmt: skip
def test_the_dimension_that_fsdp_shards(shape, spec, expected):
    sizes = MeshSizes(1, 8, 2)._asdict()
    assert sharded_spec(shape, spec, ("fsdp",), sizes) == expected


def test_every_matrix_of_a_published_model_is_sharded():
    """By the width of the residual stream, which ops can gather."""
    config = dataclasses.replace(presets.PRESETS["llama3-8b"](), zero=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=1))
    model = ModelFunctions(config, MeshSizes(1, 64, 8))
    assert model.whole_matrices == {}
    for parameter, dimension in model.sharded_dimensions.items():
        shape = model.abstract_params[parameter].shape
        assert shape[dimension] == config.model.features, parameter
        assert sharded_dimension(model.specs[parameter], "fsdp") == dimension


@pytest.mark.parametrize("weight_gather", ["blocks", "matmuls"])
def test_stacked_parameters_are_sharded_as_those_of_one_layer(weight_gather):
    sizes = MeshSizes(fsdp=4, tensor=2)
    model = dataclasses.replace(TINY.model, num_layers=4)  # As many as fsdp has devices.
    config = dataclasses.replace(TINY, model=model, zero=3, weight_gather=weight_gather)
    separate = ModelFunctions(config, sizes)
    stacked = ModelFunctions(dataclasses.replace(config, scan_layers=1), sizes)
    for name, spec in stacked.specs.items():
        one = name.replace("layers.", "layers.0.")
        layers = [None] * (one != name and len(spec) > 0)
        assert spec == P(*layers, *separate.specs[one]), name
        assert stacked.sharded_dimensions.get(name) == separate.sharded_dimensions.get(one)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [(8, P(None, ("tensor", "fsdp"), None)), (2, P("fsdp", "tensor", None))],
)
def test_matmuls_gather_columns_where_all_are_divisible(heads, expected):
    model = dataclasses.replace(TINY.model, num_heads=8, num_key_value_heads=heads)
    config = dataclasses.replace(TINY, model=model, zero=3, weight_gather="matmuls")
    specs = ModelFunctions(config, MeshSizes(fsdp=4, tensor=2)).specs
    assert specs["layers.0.attention.projection.query.kernel"] == expected
    assert specs["layers.0.attention.output.kernel"] == P("tensor", None, "fsdp")


@pytest.mark.parametrize(
    ("mesh", "zero", "devices", "expected"),
    [
        (MeshConfig(), 0, 8, (1, 1, 8)),
        (MeshConfig(tensor=2), 0, 8, (4, 1, 2)),
        # With ZeRO, fsdp takes what is left.
        (MeshConfig(tensor=2), 1, 8, (1, 4, 2)),
        (MeshConfig(data=2, tensor=2), 2, 8, (2, 2, 2)),
        (MeshConfig(fsdp=2, tensor=2), 2, 8, (2, 2, 2)),
        (MeshConfig(fsdp=2), 2, 8, (1, 2, 4)),
        (MeshConfig(fsdp=4, tensor=2), 0, 8, (1, 4, 2)),
        # Parts of sequences are asked for.
        (MeshConfig(context=2), 0, 8, (1, 1, 4, 2)),
        (MeshConfig(context=4, tensor=1), 0, 8, (2, 1, 1, 4)),
        (MeshConfig(context=2, tensor=2), 3, 8, (1, 2, 2, 2)),
        (MeshConfig(context=0, tensor=2), 0, 8, (4, 1, 2)),
    ],
)
def test_sizes_that_are_left_open_take_what_fits(mesh, zero, devices, expected):
    assert mesh_sizes(dataclasses.replace(presets.debug(), mesh=mesh, zero=zero), devices) == (
        MeshSizes(*expected)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_travel_and_are_summed_in_the_dtype_asked_for(make_mesh, dtype):
    """A sum of one and of many small numbers shows the precision."""
    mesh = make_mesh({"data": 1, "fsdp": 8})
    use = ZeroUse("bfloat16", dtype, gathers="blocks", sums=True)

    def gradient(shard, coefficients):
        def loss(shard):
            kernel = nnx.Param(shard, out_sharding=("fsdp",), eager_sharding=False)
            (weight,) = jax.tree.leaves(used(nnx.State({"kernel": kernel}), None, use, True))
            return (weight.astype("float32") * coefficients[0]).sum()

        return jax.grad(loss)(shard)

    coefficients = np.full((8, 8), 2.0**-10, np.float32)
    coefficients[0] = 1.0
    summed = jax.jit(
        jax.shard_map(gradient, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
    )
    found = np.asarray(summed(np.zeros(8, np.float32), coefficients))
    # Between 1 and 2, float32 holds steps of 2**-23 and bfloat16 of 2**-7.
    exact = 1 + 7 * 2.0**-10
    assert found.dtype == np.float32
    assert np.all(found == exact) if dtype == "float32" else np.all(abs(found - exact) >= 2**-10)
    (collective,) = [
        line
        for line in summed.lower(np.zeros(8, np.float32), coefficients).as_text().splitlines()
        if line.strip().startswith("}) : (tensor<8x")
    ]
    assert ("xf32" in collective) == (dtype == "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_over_data_are_in_the_dtype_asked_for(make_mesh, dtype):
    coefficients = np.full((8, 8), 2.0**-10, np.float32)
    coefficients[0] = 1.0
    summed = jax.shard_map(
        lambda own: sum_over(own[0], ("data",), dtype),
        mesh=make_mesh({"data": 8}),
        in_specs=P("data"),
        out_specs=P(),
    )
    found, exact = np.asarray(jax.jit(summed)(coefficients)), 1 + 7 * 2.0**-10
    assert found.dtype == dtype
    found = found.astype(np.float32)
    assert np.all(found == exact) if dtype == "float32" else np.all(abs(found - exact) >= 2**-10)


@pytest.mark.parametrize(
    ("gathers", "whole", "gradient_dtype", "expected"),
    [
        ("blocks", False, "float32", "bfloat16[8] gathered"),
        ("matmuls", True, "float32", "bfloat16[8] gathered"),
        # Layers gather shards in their own dtype, and scatter gradients in the dtype of shards.
        ("matmuls", False, "float32", "float32[1]"),
        ("matmuls", False, "bfloat16", "bfloat16[1]"),
    ],
)
def test_weights_travel_in_the_compute_dtype(make_mesh, gathers, whole, gradient_dtype, expected):
    use = ZeroUse("bfloat16", gradient_dtype, gathers=gathers, sums=True)

    def weights(shard):
        kernel = nnx.Param(shard, out_sharding=("fsdp",), eager_sharding=False)
        return jax.tree.leaves(use.weights(nnx.State({"kernel": kernel}), None, whole=whole))

    mesh = make_mesh({"data": 1, "fsdp": 8})
    sharded = jax.shard_map(weights, mesh=mesh, in_specs=P("fsdp"), out_specs=P(("data", "fsdp")))
    (equation,) = jax.make_jaxpr(sharded)(np.zeros(8, np.float32)).jaxpr.eqns
    body = equation.params["jaxpr"]
    result = body.outvars[0].aval
    travels = [e.invars[0].aval.dtype for e in body.eqns if e.primitive.name.startswith("all_gat")]
    assert travels in ([], [result.dtype])
    found = f"{result.dtype}{list(result.shape)}{' gathered' * len(travels)}"
    assert found == expected


def test_memory_of_each_level():
    """Compared with the bytes that each array takes, of 8 devices: 2 of tensor, 4 of fsdp."""
    sizes = MeshSizes(fsdp=4, tensor=2)

    def memory(zero: Any, **changes: Any) -> Memory:
        config = dataclasses.replace(four, zero=zero, compute_dtype="bfloat16", **changes)
        return memory_of(config, make_abstract_mesh(sizes))

    four = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, num_layers=4))
    shapes = ModelFunctions(four).abstract_params.values()
    matrices = sum(math.prod(leaf.shape) for leaf in shapes if len(leaf.shape) > 1)
    vectors = sum(math.prod(leaf.shape) for leaf in shapes if len(leaf.shape) == 1)
    whole, shards = 4 * (matrices // 2 + vectors), 4 * (matrices // 8 + vectors)
    counts = 8  # Of steps: AdamW's and its schedule's.
    found = {zero: memory(zero) for zero in (0, 1, 2, 3)}
    assert {zero: (m.parameters, m.optimizer_state) for zero, m in found.items()} == {
        0: (whole, 2 * whole + counts)
    } | dict.fromkeys((1, 2, 3), (shards, 2 * shards + counts))
    # Whole weights in half precision, or those of one block and what is next to it.
    assert matrices < found[1].weights + found[1].activations
    assert found[3].weights < found[2].weights
    assert found[3].total < found[2].total <= found[1].total < found[0].total
    # Whole gradients are accumulated, or shards.
    twice = {zero: memory(zero, gradient_accumulation_steps=2).total for zero in (1, 2)}
    assert twice[1] - twice[2] > 2 * matrices // 2


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_is_gathered_for_a_tied_head_alone(tied):
    sizes, shape = MeshSizes(fsdp=2, tensor=2), dataclasses.replace(TINY.model, tied_head=tied)
    changes: Any = {"zero": 3, "weight_gather": "matmuls", "overlap": "ring"}
    config = dataclasses.replace(TINY, model=shape, **changes)
    model, mesh = ModelFunctions(config, sizes), make_abstract_mesh(sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    step = sharded_step(config, model, optimizer, mesh)
    arguments = state_on_mesh(model, optimizer, mesh), abstract_batch(config)
    table = (shape.vocabulary_size // 2, shape.features)
    gathered: list[Any] = [
        variable.aval
        for equation in equations(jax.make_jaxpr(step)(*arguments).jaxpr)
        if equation.primitive.name == "all_gather"
        for variable in equation.outvars
    ]
    assert any(array.shape == table for array in gathered) == tied


def test_zero_without_shards_is_reported():
    sizes = MeshSizes(tensor=8)
    config = dataclasses.replace(TINY, zero=2)
    (line,) = describe_zero(config, ModelFunctions(config, sizes), sizes)
    assert line == (
        "zero=2: nothing is sharded, as mesh.fsdp=1; give --mesh.fsdp more devices, or leave out"
        " --zero"
    )


@pytest.mark.parametrize("scan_layers", [0, 1])
def test_matrices_that_stay_whole_are_reported(scan_layers):
    sizes, model = MeshSizes(fsdp=3), dataclasses.replace(TINY.model, num_layers=2)
    config = dataclasses.replace(TINY, zero=1, model=model, scan_layers=scan_layers)
    lines = describe_zero(config, ModelFunctions(config, sizes), sizes)
    assert lines[0] == "zero=1: parameters and optimizer state are sharded over fsdp=3"
    # In each layer, fsdp divides the hidden features of gate, up and down.
    whole = len(("embedding", "head")) + 2 * len(("query", "key", "value", "output"))
    assert lines[1].startswith(f"mesh.fsdp=3 does not divide {whole} matrices, which stay whole: ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "matmuls"),
        ({"local_devices": 4}, "blocks"),
        ({"features": 30}, "blocks"),
        ({"overlap": "ring"}, "blocks"),
        ({"compute_dtype": "bfloat16", "gradient_dtype": "bfloat16"}, "matmuls"),
        # Layers do not multiply float32 with weights in the dtype of such gradients.
        ({"gradient_dtype": "bfloat16"}, "blocks"),
    ],
    ids=str,
)
def test_where_weights_are_gathered(changes, expected):
    changes = {"overlap": "auto", "compute_dtype": "float32", "local_devices": 8} | changes
    local_devices, features = changes.pop("local_devices"), changes.pop("features", 128)
    config = dataclasses.replace(
        TINY, zero=3, model=dataclasses.replace(TINY.model, features=features), **changes
    )
    assert ModelFunctions(config, MeshSizes(fsdp=4, tensor=2), local_devices).gathers == expected


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (MeshSizes(fsdp=3), {}, "weight_gather='matmuls': mesh.fsdp=3 does not divide"),
        (
            MeshSizes(fsdp=2),
            {"compute_dtype": "float32", "gradient_dtype": "bfloat16"},
            "weight_gather='matmuls': gradients travel in gradient_dtype='bfloat16' only with",
        ),
    ],
)
def test_weights_that_matmuls_cannot_gather_are_refused(sizes, changes, message):
    config = dataclasses.replace(TINY, zero=3, weight_gather="matmuls", **changes)
    with pytest.raises(ValueError, match=message):
        ModelFunctions(config, sizes)


def test_memory_and_advice_are_for_the_devices_of_a_process():
    """A mesh of two processes gathers block by block, which takes more memory."""
    config = dataclasses.replace(TINY, overlap="auto", batch_size=16, zero=3)
    mesh = make_abstract_mesh(MeshSizes(fsdp=16))
    found = memory_of(config, mesh, local_devices=8)
    blocks = memory_of(dataclasses.replace(config, weight_gather="blocks"), mesh)
    assert found == blocks
    assert found.total > memory_of(config, mesh).total
    # It fits as it is.
    told = advice(config, mesh, found, found.total, local_devices=8)
    assert told.endswith(f"takes {found.total:,} bytes")


def test_advice_traces_no_run_that_is_estimated_as_far_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of many layers takes half a minute."""
    traced = []

    def counted(config: Config, mesh: AbstractMesh, **options: Any) -> Memory:
        traced.append(config.remat)
        return memory_of(config, mesh, **options)

    monkeypatch.setattr(step_memory, "memory_of", counted)
    config, mesh = dataclasses.replace(TINY, batch_size=4), make_abstract_mesh(MeshSizes(tensor=2))
    memory = memory_of(config, mesh)
    full = memory_of(dataclasses.replace(config, remat="full"), mesh).total
    estimates = {"full": 1.3 * full, "none": 1.5 * full}
    told = advice(
        config, mesh, memory, full, estimate=lambda run, _: estimates.get(run.remat, 2.0 * full)
    )
    assert told == f"it fits with --remat full, and then takes {full:,} bytes"
    assert traced == ["full"]


@pytest.mark.parametrize(
    ("fits", "local", "sentence"),
    [
        (lambda run, sizes: sizes.tensor == 4, 4, "it fits with --mesh.data 1 --mesh.tensor 4, "),
        (
            lambda run, sizes: run.gradient_dtype == "bfloat16",
            4,
            "it fits with --gradient-dtype bfloat16, ",
        ),
        (
            lambda run, sizes: sizes.devices == 16,
            2,
            "it fits on 16 devices with --mesh.context 4, ",
        ),
        (
            lambda run, sizes: False,
            2,
            "it fits with more --mesh.context than 8, or with a shorter --sequence-length",
        ),
        (
            lambda run, sizes: False,
            None,
            "it fits with more --mesh.tensor than 8, or with more --mesh.context than 8, or",
        ),
    ],
)
def test_advice_keeps_the_devices_or_says_how_many(
    fits: Callable[[Config, MeshSizes], bool],
    local: int | None,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor axis stays within a process of `local` devices."""

    def memory_of(config: Config, mesh: AbstractMesh, **_: Any) -> Memory:
        return Memory(0, 0, 0, 10 if fits(config, MeshSizes(**mesh.shape)) else 20)

    monkeypatch.setattr(step_memory, "memory_of", memory_of)
    config = dataclasses.replace(TINY, batch_size=2, compute_dtype="bfloat16", overlap="auto")
    mesh = make_abstract_mesh(MeshSizes(data=2, tensor=2))
    told = advice(config, mesh, Memory(0, 0, 0, 20), 10, local_devices=local)
    assert told.startswith(sentence)


def test_advice_takes_no_mesh_that_a_run_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here fsdp 4 × tensor 3, which does not divide 6 sequences."""
    tried = []

    def memory_of(config: Config, mesh: AbstractMesh, **_: Any) -> Memory:
        tried.append(MeshSizes(**mesh.shape))
        return Memory(0, 0, 0, 20)

    monkeypatch.setattr(step_memory, "memory_of", memory_of)
    model = dataclasses.replace(
        TINY.model, num_heads=12, num_key_value_heads=12, features=96, hidden_features=96,
        vocabulary_size=96,
    )  # fmt: skip
    config = dataclasses.replace(TINY, model=model, batch_size=6, sequence_length=48, zero=3)
    mesh = make_abstract_mesh(MeshSizes(fsdp=6, tensor=2))
    advice(config, mesh, Memory(0, 0, 0, 20), 10)
    assert MeshSizes(fsdp=3, tensor=4) in tried
    assert all(6 % (sizes.data * sizes.fsdp) == 0 for sizes in tried)


def test_unknown_levels_are_refused():
    with pytest.raises(ValueError, match="zero=5: expected 0, 1, 2 or 3"):
        check(dataclasses.replace(TINY, zero=5), MeshSizes())  # pyright: ignore
