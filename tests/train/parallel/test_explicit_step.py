"""`--overlap rewrite-jit`: steps over mesh axes of type Explicit train as those of rings do."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collective_matmul import overlap
from tests.rewrite.programs import sites
from tests.train.initial_weights import first_state
from train.config import presets
from train.config.checks import check
from train.config.config import Config, MeshSizes
from train.memory.step_memory import memory_of
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import abstract_state, state_on_mesh
from train.parallel import explicit_step
from train.parallel.batches import BATCH_SPEC, Batch
from train.parallel.mesh import make_abstract_mesh, make_mesh
from train.parallel.model import ModelFunctions
from train.step import make_step, sharded_step

_SHORT = presets.debug()
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


def step_of(config: Config, sizes: MeshSizes) -> tuple[Any, Any, Batch]:
    """The compiled step, its first state and a batch."""
    check(config, sizes)
    mesh, model = make_mesh(sizes), ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    step = make_step(config, model, optimizer, mesh)
    batch: Batch = jax.device_put(batch_of(config), NamedSharding(mesh, BATCH_SPEC))
    return step, first_state(config, model, optimizer, mesh), batch


def compiled(config: Config, sizes: MeshSizes) -> str:
    """The compiled step, as text."""
    check(config, sizes)
    mesh, model = make_mesh(sizes), ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    batch = jax.device_put(batch_of(config), NamedSharding(mesh, BATCH_SPEC))
    step = make_step(config, model, optimizer, mesh)
    return step.lower(state_on_mesh(model, optimizer, mesh), batch).compile().as_text()


def losses(config: Config, sizes: MeshSizes) -> dict[str, list[float]]:
    """The losses and gradient norms of three steps with one batch."""
    step, state, batch = step_of(config, sizes)
    history = []
    for _ in range(3):
        state, metrics = step(state, batch)
        history.append(jax.device_get(metrics))
    return {name: [each[name] for each in history] for name in ("loss", "grad_norm")}


def jaxpr_of(config: Config, sizes: MeshSizes, **options: Any) -> Any:
    """The program of a step."""
    model = ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    step: Any = sharded_step(config, model, optimizer, make_abstract_mesh(sizes), **options)
    return jax.make_jaxpr(step)(abstract_state(model, optimizer), batch_of(config)).jaxpr


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrites the loss with rings, which are not chosen on CPUs."""
    with_rings = functools.partial(overlap, implementation="ring")
    monkeypatch.setattr(explicit_step, "overlap", with_rings)


SINKS: dict[str, Any] = {
    "attention_sinks": True, "output_bias": True, "sliding_window": 5, "full_attention_period": 2,
}  # fmt: skip
MUON = dataclasses.replace(SHORT.optimizer, kind="muon")

CASES = [
    # Sinks, and layers of two kinds in turns.
    pytest.param(
        {"scan_layers": 1, "gradient_accumulation_steps": 2, "chat": True},
        FAMILY | SINKS,
        id="chat-sinks",
    ),
    pytest.param(
        {"scan_layers": 2, "gradient_accumulation_steps": 2, "chat": True},
        FAMILY,
        id="chat",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        {"separate_documents": True, "gradient_accumulation_steps": 2, "remat": "full"},
        UNEVEN | SINKS,
        id="documents-sinks-unrolled",
        marks=pytest.mark.exhaustive,
    ),
]
ZERO = [
    ((2, 2, 2), {"zero": 2, "gradient_accumulation_steps": 2}),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            # By default its program is compared with that of the layers, below.
            ((1, 2, 4), {"zero": 3, "scan_layers": 1}),
            ((1, 4, 2), {"zero": 3, "gradient_accumulation_steps": 2, "remat": "full"}),
            ((1, 2, 4), {"zero": 1, "gradient_accumulation_steps": 2, "scan_layers": 1}),
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


@pytest.mark.usefixtures("rings")
@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        pytest.param(MeshSizes(tensor=4), {}, "all-gather", marks=pytest.mark.exhaustive),
        (MeshSizes(fsdp=4), {"zero": 3, "remat": "full"}, "all-to-all"),
    ],
    ids=str,
)
def test_a_step_compiles_to_the_matmuls_and_messages_of_the_layers(
    sizes: MeshSizes, changes: dict, message: str
) -> None:
    """So its backward gathers and scatters as theirs does, in the loops of matmuls."""
    found = []
    for way in ({"overlap": "rewrite-jit"}, {"overlap": "ring", "weight_gather": "matmuls"}):
        text = compiled(config_of(changes | way, {"num_layers": 1}), sizes)
        found.append(Counter(re.findall(rf" (dot|collective-permute|{message})\(", text)))
    assert found[0] == found[1] and found[0].total() > 50


@pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 4, 1), (1, 8, 1), (1, 2, 4)], ids=str)
def test_weights_are_sharded_as_by_auto(sizes: tuple) -> None:
    """In columns where these sizes divide them; 8 divides no key and value heads."""
    config = config_of({"zero": 3}, {"num_key_value_heads": 4})
    automatic = ModelFunctions(dataclasses.replace(config, overlap="auto"), MeshSizes(*sizes))
    assert ModelFunctions(config, MeshSizes(*sizes)).specs == automatic.specs
    by_columns = "layers.0.feed_forward.up.kernel", P(None, ("tensor", "fsdp"))
    assert (by_columns in automatic.specs.items()) == (math.prod(sizes) < 8)


def test_matrices_are_cast_once() -> None:
    """Not again by the backward, which recomputes blocks."""
    changes = {"compute_dtype": "bfloat16", "remat": "full", "scan_layers": 0}
    config, sizes = config_of(changes, {}), MeshSizes(tensor=4)
    model = ModelFunctions(config, sizes)
    shapes = {model.abstract_params[name].shape for name in model.matrices}
    casts = [
        equation
        for equation in equations(jaxpr_of(config, sizes))
        if equation.primitive.name == "convert_element_type"
        and equation.outvars[0].aval.dtype == "bfloat16"
        and equation.invars[0].aval.shape in shapes
    ]
    assert len(casts) == len(model.matrices)


@pytest.mark.exhaustive
def test_muon_updates_the_same() -> None:
    config = config_of({"zero": 1, "optimizer": MUON}, {})
    found = losses(config, MeshSizes(2, 2, 2))
    assert_same(found, losses(dataclasses.replace(config, overlap="xla"), MeshSizes(2, 2, 2)))


@pytest.mark.usefixtures("rings")
@pytest.mark.parametrize(("zero", "rewrite"), [(1, True), (3, False), (3, True)])
def test_loops_over_layers_leave_no_whole_weights_or_gradients(zero: int, rewrite: bool) -> None:
    config, sizes = config_of({"zero": zero, "scan_layers": 1}, {}), MeshSizes(1, 2, 4)
    jaxpr = jaxpr_of(config, sizes, rewrite=rewrite)
    abstract = ModelFunctions(config, sizes).abstract_params
    stacked = {leaf.shape for name, leaf in abstract.items() if "kernel" in name}
    results = [aval for aval in results_of_loops(jaxpr) if aval.shape in stacked]
    # The gradients, and nothing from the forward to the backward.
    assert len(results) == 7
    assert all("fsdp" in str(aval.sharding.spec) for aval in results)


@pytest.mark.parametrize("zero", [1, 2])
def test_shards_of_gradients_are_accumulated(zero: int) -> None:
    config = config_of({"zero": zero, "gradient_accumulation_steps": 2}, {})
    model = ModelFunctions(config, MeshSizes(1, 2, 4))
    loop = results_of_loops(jaxpr_of(config, MeshSizes(1, 2, 4)))
    shards = [aval for aval in loop if "fsdp" in str(aval.sharding.spec)]
    assert len(loop) == 1 + len(model.specs)
    assert len(shards) == len(model.sharded_dimensions)


def test_shards_of_gradients_are_predicted_for_level_1() -> None:
    mesh = make_abstract_mesh(MeshSizes(1, 2, 4))
    changes = {"gradient_accumulation_steps": 2}
    level_1, level_2 = (memory_of(config_of(changes | {"zero": n}, {}), mesh) for n in (1, 2))
    assert level_1 == level_2
    whole = config_of(changes | {"zero": 1, "overlap": "auto"}, {})
    assert level_1.total < memory_of(whole, mesh).total


@pytest.mark.parametrize(
    ("zero", "remat", "tied_head"), [(1, "none", False), (1, "full", True), (2, "full", False)]
)
def test_each_gradient_is_sharded_in_the_dtype_of_its_sum(
    zero: int, remat: str, tied_head: bool
) -> None:
    """XLA makes no reduce-scatter of sums, a cast or an addition, and a slice."""
    changes = {"zero": zero, "remat": remat, "compute_dtype": "bfloat16"}
    config = config_of(changes, {"tied_head": tied_head})
    model = ModelFunctions(config, MeshSizes(1, 2, 4))
    divided = [
        equation.outvars[0].aval.dtype.name
        for equation in equations(jaxpr_of(config, MeshSizes(1, 2, 4)))
        if equation.primitive.name == "reshard"
        # The arguments of the step are sharded over both axes at once.
        and "tensor" in (before := str(equation.invars[0].aval.sharding.spec))
        and "fsdp" not in before
        and "fsdp" in str(equation.outvars[0].aval.sharding.spec)
    ]
    # A table that is the head too has a gradient of each use.
    assert divided == ["bfloat16"] * (len(model.sharded_dimensions) + tied_head)


def results_of_loops(jaxpr: Any) -> list[Any]:
    """The types of what loops return."""
    loops = (each for each in equations(jaxpr) if each.primitive.name == "scan")
    return [var.aval for loop in loops for var in loop.outvars]


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
    ("sizes", "changes", "model", "number", "alone"),
    [
        (MESH, {"gradient_accumulation_steps": 2}, {}, 5, 0),
        (MESH, {"scan_layers": 1}, {}, 5, 0),
        (MESH, {"scan_layers": 2, "remat": "full"}, {}, 5, 0),
        (MESH, {"chat": True}, FAMILY, 5, 0),
        (MESH, {}, UNEVEN, 5, 0),
        (MESH, {}, {"tied_head": True}, 5, 0),
        ((1, 1, 8), {}, {}, 5, 0),
        # The gather of the tokens has no matmul, nor has that of a table that is the head too; and
        # of two axes that shard the batch, one is left.
        ((1, 2, 4), {"zero": 3}, {}, 5 + 8, 1),
        ((1, 2, 4), {"zero": 3, "scan_layers": 1}, {"tied_head": True}, 5 + 7, 1),
        ((2, 2, 2), {"zero": 3, "scan_layers": 1}, {}, 5 + 8, 3),
        ((2, 2, 2), {"zero": 2, "gradient_accumulation_steps": 2}, {}, 5, 0),
        ((1, 2, 4), {"zero": 1, "compute_dtype": "bfloat16"}, {}, 5, 0),
    ],
    ids=str,
)
def test_every_matmul_that_communicates_is_a_site(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple,
    changes: dict,
    model: dict,
    number: int,
    alone: int,
) -> None:
    found, required = [], []

    def looked_at(loss: Any, require: int, fp8: None) -> Any:
        del fp8

        def call(*arguments: Any) -> jax.Array:
            required.append(require)
            found.extend(sites(loss, *arguments))
            return loss(*arguments)

        return call

    monkeypatch.setattr(explicit_step, "overlap", looked_at)
    jaxpr_of(config_of(changes, model), MeshSizes(*sizes))
    assert required == [number]
    replaced = sum(site.replaced for site in found)
    assert (replaced, len(found) - replaced) == (number, alone)
