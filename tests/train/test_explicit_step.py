"""`--overlap rewrite-jit`: steps over mesh axes of type Explicit train as those of rings do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding

from collective_matmul import overlap
from tests.rewrite.programs import sites
from train import config as configs
from train import step as steps
from train.config import Config, MeshSizes
from train.explicit_step import required_sites
from train.mesh import make_abstract_mesh, make_mesh
from train.state import ModelFunctions, abstract_state, init_state, make_optimizer
from train.step import BATCH_SPEC, Batch, make_step, sharded_step

_SHORT = configs.debug()
SHORT = dataclasses.replace(
    _SHORT,
    batch_size=8,
    sequence_length=16,
    compute_dtype="float32",
    overlap="rewrite-jit",
    model=dataclasses.replace(
        _SHORT.model, num_layers=2, features=32, hidden_features=64, head_dim=8
    ),
)
MESH = MeshSizes(data=2, tensor=4)
FAMILY = {"projection_bias": True, "query_key_norm": True, "sliding_window": 5}
#: More rows than tokens, and keys and values that two devices have.
UNEVEN = {"padded_vocabulary_size": 264, "num_key_value_heads": 2}


def config_of(changes: dict[str, Any], model: dict[str, Any]) -> Config:
    return dataclasses.replace(SHORT, model=dataclasses.replace(SHORT.model, **model), **changes)


def batch_of(config: Config) -> dict[str, np.ndarray]:
    """Random tokens; documents of 5, 0 and the remaining tokens, and answers of some of them."""
    random = np.random.default_rng(0)
    shape = config.batch_size, config.sequence_length
    batch = {
        name: random.integers(config.model.vocabulary_size, size=shape, dtype=np.int32)
        for name in ("inputs", "targets")
    }
    if config.separate_documents or config.chat:
        first = random.integers(1, shape[1], size=shape[0], dtype=np.int32)
        batch["document_lengths"] = np.stack([first, shape[1] - first, 0 * first], axis=1)
    if config.chat:
        batch["answers"] = random.integers(2, size=shape, dtype=np.int32)
    return batch


def losses(config: Config, sizes: MeshSizes) -> dict[str, list[float]]:
    """The losses and gradient norms of three steps with one batch."""
    configs.check(config, sizes)
    mesh, model = make_mesh(sizes), ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    step = make_step(config, model, optimizer, mesh)
    state = init_state(model, optimizer, mesh)
    batch: Batch = jax.device_put(batch_of(config), NamedSharding(mesh, BATCH_SPEC))
    history = []
    for _ in range(3):
        state, metrics = step(state, batch)
        history.append(jax.device_get(metrics))
    return {name: [each[name] for each in history] for name in ("loss", "grad_norm")}


def found_sites(config: Config, sizes: MeshSizes) -> tuple[int, int]:
    """The sites of the model that are replaced, and those that are left alone."""
    model = ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    step: Any = sharded_step(config, model, optimizer, make_abstract_mesh(sizes), rewrite=False)
    found = sites(step, abstract_state(model, optimizer), batch_of(config))
    found = [site for site in found if site.source and "models/" in site.source.file]
    replaced = sum(site.replaced for site in found)
    return replaced, len(found) - replaced


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrites the step with rings, which are not chosen on CPUs."""
    monkeypatch.setattr(steps, "overlap", functools.partial(overlap, implementation="ring"))


MUON = dataclasses.replace(SHORT.optimizer, kind="muon")

CASES = [
    pytest.param({"gradient_accumulation_steps": 2, "scan_layers": 1}, {}, id="scan"),
    pytest.param({"scan_layers": 2, "chat": True}, FAMILY, id="chat"),
    pytest.param(
        {"separate_documents": True, "gradient_accumulation_steps": 2, "remat": "full"},
        UNEVEN,
        id="documents",
        marks=pytest.mark.exhaustive,
    ),
]
ZERO = [
    ((1, 2, 4), {"zero": 3, "scan_layers": 1}),
    ((2, 2, 2), {"zero": 1}),
    ((1, 2, 4), {"zero": 2, "gradient_accumulation_steps": 2}),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            ((1, 4, 2), {"zero": 3, "remat": "full"}),
            ((2, 2, 2), {"zero": 3, "gradient_accumulation_steps": 2}),
            ((1, 2, 4), {"zero": 1, "gradient_accumulation_steps": 2}),
            ((2, 2, 2), {}),
        )
    ),
]


@pytest.mark.usefixtures("rings")
@pytest.mark.parametrize(("changes", "model"), CASES)
def test_a_step_has_the_losses_of_rings(changes: dict, model: dict) -> None:
    config = config_of(changes, model)
    expected = losses(dataclasses.replace(config, overlap="ring"), MESH)
    assert_same(losses(config, MESH), expected)


@pytest.fixture(scope="module")
def of_rings() -> dict[str, list[float]]:
    return losses(dataclasses.replace(SHORT, overlap="ring"), MESH)


@pytest.mark.usefixtures("rings")
@pytest.mark.parametrize(("sizes", "changes"), ZERO, ids=str)
def test_shards_of_weights_do_not_change_the_losses(
    of_rings: dict[str, list[float]], sizes: tuple, changes: dict
) -> None:
    assert_same(losses(config_of(changes, {}), MeshSizes(*sizes)), of_rings)


@pytest.mark.exhaustive
def test_muon_updates_the_same() -> None:
    config = config_of({"zero": 1, "optimizer": MUON}, {})
    found = losses(config, MeshSizes(2, 2, 2))
    assert_same(found, losses(dataclasses.replace(config, overlap="xla"), MeshSizes(2, 2, 2)))


def test_level_3_keeps_no_whole_weights_for_the_backward() -> None:
    config, sizes = config_of({"zero": 3, "scan_layers": 1}, {}), MeshSizes(1, 2, 4)
    model = ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    step: Any = sharded_step(config, model, optimizer, make_abstract_mesh(sizes), rewrite=False)
    jaxpr = jax.make_jaxpr(step)(abstract_state(model, optimizer), batch_of(config)).jaxpr
    stacked = {leaf.shape for name, leaf in model.abstract_params.items() if "kernel" in name}
    results = [
        var.aval
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan"
        for var in equation.outvars
        if var.aval.shape in stacked
    ]
    # The gradients, and nothing from the forward to the backward.
    assert len(results) == 7
    assert all("fsdp" in str(aval.sharding.spec) for aval in results)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, at any depth."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def assert_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    # float32 sums in another order. The learning rate of the first step is zero. A wrong gradient
    # changes its norm in all steps, and the third loss by 1e-2.
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=2e-5)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=1e-4)
    assert found["loss"][0] - found["loss"][2] > 0.01


@pytest.mark.parametrize(
    ("sizes", "changes", "model", "more", "alone"),
    [
        (MESH, {"gradient_accumulation_steps": 2}, {}, 0, 0),
        (MESH, {"scan_layers": 1}, {}, 0, 0),
        # What the backward recomputes: a block's gathers and its first scatter.
        (MESH, {"scan_layers": 2, "remat": "full"}, {}, 3, 0),
        (MESH, {"chat": True}, FAMILY, 0, 0),
        # The kernels of keys and values are repeated, and their gradients gathered for the sum.
        (MESH, {}, UNEVEN, 0, 2),
        (MESH, {}, {"tied_head": True}, 0, 0),
        ((1, 1, 8), {}, {}, 0, 0),
        ((1, 2, 4), {}, {}, 0, 0),
        ((1, 2, 4), {"zero": 3}, {}, 0, 3),
        ((1, 2, 4), {"zero": 3, "scan_layers": 1}, {"tied_head": True}, 0, 3),
        ((2, 2, 2), {"zero": 3, "scan_layers": 1}, {}, 0, 19),
        ((2, 2, 2), {"zero": 2, "gradient_accumulation_steps": 2}, {}, 0, 28),
        ((1, 2, 4), {"zero": 1, "compute_dtype": "bfloat16"}, {}, 0, 15),
    ],
    ids=str,
)
def test_every_matmul_that_communicates_is_a_site(
    sizes: tuple, changes: dict, model: dict, more: int, alone: int
) -> None:
    config, sizes = config_of(changes, model), MeshSizes(*sizes)
    required = required_sites(ModelFunctions(config, sizes), make_abstract_mesh(sizes))
    assert found_sites(config, sizes) == (required + more, alone)
