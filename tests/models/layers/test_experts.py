"""Models with experts, wherever these are: beside Hugging Face's library and an independent one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul.layers import load_balancing_loss, router_z_loss
from models import explicit
from models.generation import Generator
from models.generation.generator import make_mesh as tensor_mesh
from models.hugging_face import ModelFolder, load
from models.hugging_face.tensor_names import tensors
from models.llama import Llama
from tests.models import reference
from tests.models.families.test_families import MODELS
from tests.models.hugging_face.folders import DATA, NAMES
from tests.models.test_llama import BATCH, SEQUENCE, TOLERANCE, random_params, random_tokens
from train.config.config import Config, MeshSizes
from train.parallel.mesh import BATCH_AXES, make_mesh
from train.parallel.model import ModelFunctions

WITH_EXPERTS = [name for name in NAMES if (DATA / name / "config.json").read_text().count("expert")]
ALL_AXES = (*BATCH_AXES, "tensor")
#: Sizes of fsdp and tensor, the axes that divide experts, and the one of their hidden features.
PLACEMENTS = [
    (2, 2, "tensor", None),
    (2, 2, "fsdp", None),
    (2, 2, ("fsdp", "tensor"), None),
    (2, 2, "fsdp", "tensor"),
    (2, 2, (), "tensor"),
    (1, 1, "tensor", None),
    (2, 1, "fsdp", None),
    (1, 2, ("fsdp", "tensor"), None),
    (4, 1, "fsdp", None),
    (1, 4, "tensor", None),
    (1, 4, (), "tensor"),
]


def placed(name: str, placement: Any, **options: Any) -> tuple[Any, Mesh, dict[str, P], Any]:
    """A function that makes the model of its parameters; the mesh, their specs, and they."""
    fsdp, tensor, experts, hidden = placement
    mesh = make_mesh(MeshSizes(1, fsdp, tensor))
    folder = ModelFolder(DATA / name)

    def build() -> Llama:
        return Llama(
            folder.config, dtype="float32", key_value_copies=folder.config.key_value_copies(tensor),
            expert_axis_name=experts, expert_hidden_axis_name=hidden, rngs=nnx.Rngs(0), **options,
        )  # fmt: skip

    graph, state = nnx.split(nnx.eval_shape(build))
    paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
    leaves = dict(nnx.to_flat_state(state))
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(state)))
    specs = {name: specs[path].get_value() for name, path in paths.items()}
    abstract = {
        name: jax.ShapeDtypeStruct(
            leaves[path].shape, jnp.float32, sharding=NamedSharding(mesh, specs[name])
        )
        for name, path in paths.items()
    }

    def merged(params: dict[str, jax.Array]) -> Llama:
        own = [(path, leaves[path].replace(params[name])) for name, path in paths.items()]
        return nnx.merge(graph, nnx.from_flat_state(own))

    return merged, mesh, specs, load(folder, abstract)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        *(("mixtral", placement) for placement in (PLACEMENTS[0], PLACEMENTS[4])),
        ("qwen3-moe", PLACEMENTS[6]),
        *(("gpt-oss", placement) for placement in PLACEMENTS[1:4]),
        *(
            pytest.param(name, placement, marks=pytest.mark.exhaustive)
            for name, placements in {
                "mixtral": (*PLACEMENTS[1:4], *PLACEMENTS[5:]),
                "qwen3-moe": PLACEMENTS[:1],
                "qwen3-moe-not-normalized": PLACEMENTS[1:2],
                "gpt-oss": (PLACEMENTS[0], PLACEMENTS[4]),
            }.items()
            for placement in placements
        ),
    ],
    ids=str,
)
def test_logits_and_router_losses_are_those_of_the_library(name, placement):
    scanned = {"scan_layers": 1} if placement[2] == "fsdp" else {}
    merged, mesh, specs, params = placed(name, placement, **scanned)
    expected = np.load(DATA / name / "expected.npz")

    def run(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, statistics = merged(params).logits_and_statistics(tokens)
        assert statistics is not None
        whole = statistics.sum_over_devices(ALL_AXES)
        return logits, load_balancing_loss(whole.sum_over_layers())

    tokens = np.tile(expected["tokens"], (4, 1))
    run = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs, P("fsdp")),
        out_specs=(P("fsdp", None, "tensor"), P()),
    )
    logits, loss = jax.jit(run)(params, tokens)
    assert np.max(np.abs(logits - expected["logits"])) < 1e-4
    np.testing.assert_allclose(loss, expected["router_loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        (WITH_EXPERTS[0], 1),
        (WITH_EXPERTS[2], 4),
        *(
            pytest.param(name, 4, marks=pytest.mark.exhaustive)
            for name in WITH_EXPERTS
            if name != WITH_EXPERTS[2]
        ),
    ],
)
def test_the_likeliest_answer_is_that_of_the_library(name, devices):
    folder = ModelFolder(DATA / name)
    generator = Generator(folder.config, mesh=tensor_mesh(devices), dtype="float32")
    expected = np.load(DATA / name / "expected.npz")
    answer = expected["answer"].tolist()
    (found,) = generator(
        load(folder, generator.abstract_params),
        [expected["tokens"][0, :4].tolist()],
        max_new_tokens=len(answer),
    )
    assert found == answer


def functions_of(**changes: Any) -> ModelFunctions:
    options = {"overlap": "xla", "compute_dtype": "float32", **changes}
    config = Config(model=MODELS["experts"], **options)
    return ModelFunctions(config, MeshSizes(1, 2, 2))


@functools.cache
def params_of_experts() -> Any:
    return random_params(functions_of())


@functools.cache
def reference_gradients() -> Any:
    """The loss with those of routers, and its gradients, by the independent model."""
    model, (tokens, targets) = MODELS["experts"], random_tokens()

    def loss(params: Any) -> jax.Array:
        _, of_routers = reference.logits_and_router_logits(model, params, tokens)
        mean = jnp.mean(reference.loss(model, params, tokens, targets))
        return with_router_losses(mean, *reference.router_losses(model, of_routers))

    return jax.jit(jax.value_and_grad(loss))(params_of_experts())


def with_router_losses(loss: Any, balance: Any, z: Any) -> Any:
    """Weights that make every part of gradients matter."""
    return loss + 0.3 * balance + 0.1 * z


@pytest.mark.parametrize(
    ("scan", "changes"),
    [
        (1, {"zero": 3, "weight_gather": "blocks"}),
        (0, {"zero": 3, "weight_gather": "matmuls", "remat": "dots"}),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (0, {}),
                (1, {}),
                (0, {"zero": 3, "weight_gather": "blocks"}),
                (1, {"zero": 3, "weight_gather": "matmuls", "remat": "dots"}),
                (0, {"remat": "full", "overlap": "rewrite"}),
                (1, {"remat": "full", "overlap": "rewrite"}),
            )
        ),
    ],
    ids=str,
)
def test_gradients_of_router_losses_pass_loops_over_blocks(changes, scan):
    functions = functions_of(**changes, scan_layers=scan)
    tokens, targets = random_tokens()

    def local(params: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            losses, statistics = functions.merge(params).loss_and_statistics(tokens, targets)
            assert statistics is not None
            whole = statistics.sum_over_devices(ALL_AXES).sum_over_layers()
            mean = jax.lax.psum(jnp.sum(losses), BATCH_AXES) / (BATCH * SEQUENCE)
            return with_router_losses(mean, load_balancing_loss(whole), router_z_loss(whole))

        return jax.value_and_grad(loss)(params)

    batch = P(BATCH_AXES)
    sharded = jax.shard_map(
        local,
        mesh=make_mesh(MeshSizes(1, 2, 2)),
        in_specs=(functions.specs, batch, batch),
        out_specs=(P(), functions.specs),
    )

    def stacked(params: Any) -> Any:
        return params if not scan else move(params, functions.abstract_params)

    found, gradients = jax.jit(sharded)(stacked(params_of_experts()), tokens, targets)
    expected, expected_gradients = reference_gradients()
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    for name, gradient in stacked(expected_gradients).items():
        np.testing.assert_allclose(gradients[name], gradient, **TOLERANCE, err_msg=name)


def move(params: Any, abstract: Any) -> Any:
    """Parameters of each layer, stacked as `abstract` describes them."""
    return {
        name: params[name]
        if name in params
        else np.stack([params[name.replace("layers.", f"layers.{n}.")] for n in range(2)])
        for name in abstract
    }


def test_each_device_reads_its_own_experts(monkeypatch):
    folder, read = ModelFolder(DATA / "mixtral"), []

    def counted(name: str, index: Any) -> np.ndarray:
        read.append(name)
        return ModelFolder.read(folder, name, index)

    monkeypatch.setattr(folder, "read", counted)
    generator = Generator(folder.config, mesh=tensor_mesh(2))
    load(folder, generator.abstract_params)
    of_experts = [tensor.name for _, tensor in tensors(folder.config) if tensor.expert is not None]
    assert sorted(name for name in read if "experts." in name) == sorted(of_experts)


def test_global_arrays_are_refused():
    model, batch = MODELS["experts"], map(jnp.asarray, random_tokens())
    with pytest.raises(ValueError, match="num_experts=8: models with experts are not computed"):
        explicit.loss(Llama(model, rngs=nnx.Rngs(0)), model, *batch)
