"""The training step computes the same on every mesh, and has only rings between blocks."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
import pytest

from collective_matmul import overlap, record_decisions
from collective_matmul.schedule.schedules import make_schedule
from tests.rewrite.programs import counts
from tests.train.initial_weights import first_state
from train import step as steps
from train.checkpoint.new_state import init_state
from train.config import presets
from train.config.checks import check
from train.config.config import ONE_DEVICE, Config, MeshSizes, OptimizerConfig
from train.data.dataset import open_dataset
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import TrainState, abstract_state, state_on_mesh
from train.parallel import explicit_step
from train.parallel.batches import global_arrays
from train.parallel.mesh import make_abstract_mesh, make_mesh
from train.parallel.model import ModelFunctions
from train.step import make_step, sharded_step

SHORT = dataclasses.replace(
    presets.debug(), batch_size=8, sequence_length=64, compute_dtype="float32"
)

MESH = MeshSizes(data=2, tensor=4)

STEPS = 20  # The loss falls by a third.
COMPARED = 8  # A wrong gradient changes the second loss.


class Trainer:
    """A step, and its state on a mesh."""

    def __init__(self, config: Config, sizes: MeshSizes):
        self.config, self.mesh = config, make_mesh(sizes)
        self.model = ModelFunctions(config, sizes)
        self.optimizer = make_optimizer(config.optimizer, config.steps, self.model.specs)
        self.step = make_step(config, self.model, self.optimizer, self.mesh)
        self._dataset = open_dataset(
            None,
            None,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            seed=config.seed,
        )
        self.restart()

    @functools.cached_property
    def state(self) -> TrainState:
        """State that the next step begins with. A trainer that only lowers its step has none."""
        return first_state(self.config, self.model, self.optimizer, self.mesh)

    def restart(self):
        """Back to the initial state and the first batch."""
        vars(self).pop("state", None)
        self.batches = self._dataset.iterator()

    def lowered(self) -> Any:
        """The step before its compilation."""
        return self.step.lower(state_on_mesh(self.model, self.optimizer, self.mesh), self.batch())

    def batch(self):
        batch = next(self.batches)
        return global_arrays(batch, self.mesh, len(batch["inputs"]))

    def run(self, steps: int) -> dict[str, np.ndarray]:
        """Loss and gradient norm of each step."""
        history = []
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch())
            history.append(jax.device_get(metrics))
        return {name: np.array([m[name] for m in history]) for name in history[0]}


@functools.cache
def curve_of_one_device() -> dict[str, np.ndarray]:
    return Trainer(dataclasses.replace(SHORT, overlap="xla"), ONE_DEVICE).run(STEPS)


@pytest.fixture
def one_device() -> dict[str, np.ndarray]:
    return curve_of_one_device()


@pytest.mark.parametrize(
    ("sizes", "overlap", "changes"),
    [
        ((2, 2, 2), "ring", {"zero": 1, "gradient_accumulation_steps": 2, "remat": "full"}),
        ((1, 1, 8), "ring", {"remat": "dots"}),
        ((1, 4, 2), "xla", {"zero": 3, "gradient_accumulation_steps": 2}),
        ((2, 2, 2), "ring", {"zero": 3, "scan_layers": 1, "weight_gather": "matmuls"}),
        pytest.param((8, 1, 1), "ring", {}, marks=pytest.mark.exhaustive),
        pytest.param((2, 4, 1), "xla", {"zero": 2}, marks=pytest.mark.exhaustive),
        # They choose xla on CPUs; the rewrite to rings has a test of its own.
        pytest.param((4, 1, 2), "rewrite-jit", {"remat": "full"}, marks=pytest.mark.exhaustive),
        pytest.param((2, 1, 4), "rewrite-jit", {"remat": "dots"}, marks=pytest.mark.exhaustive),
        # tests/train/parallel/test_zero_curves.py has more pairs.
        pytest.param((1, 1, 1), "ring", {}, marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 8), "xla", {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_loss_curve(one_device, sizes, overlap, changes):
    config = dataclasses.replace(SHORT, overlap=overlap, **changes)
    curve = Trainer(config, MeshSizes(*sizes)).run(COMPARED)
    assert one_device["loss"][0] > 5.4
    assert one_device["loss"][-1] < 3.6
    # Everything is float32. Meshes differ in the order of sums, a relative error of about 1e-7 per
    # step in the gradient. Adam divides by the root of the second moment, which keeps relative
    # errors, and training amplifies them: measured, the curves differ by at most 2e-5 after 50
    # steps. A wrong gradient changes the loss of the second step by 1e-2.
    np.testing.assert_allclose(curve["loss"], one_device["loss"][:COMPARED], rtol=3e-4)
    np.testing.assert_allclose(curve["grad_norm"][:5], one_device["grad_norm"][:5], rtol=1e-3)
    # Before training amplifies anything: measured at most 6e-7. Weights that are gathered in half
    # precision differ by more.
    np.testing.assert_allclose(curve["loss"][:3], one_device["loss"][:3], rtol=5e-6)


def test_half_precision_stays_near_float32(one_device):
    config = dataclasses.replace(SHORT, overlap="ring", compute_dtype="bfloat16")
    trainer = Trainer(config, MESH)
    curve = trainer.run(5)
    assert all(leaf.dtype == "float32" for leaf in trainer.state["params"].values())
    # bfloat16 has 8 bits: activations are off by up to 0.4 %, and losses, which are means, by less.
    np.testing.assert_allclose(curve["loss"], one_device["loss"][:5], rtol=2e-2)
    assert not np.allclose(curve["loss"], one_device["loss"][:5], rtol=1e-6)


def test_the_optimizer_equals_adamw_with_clipping_in_optax():
    """Compares with optax on whole arrays, with the gradients of the reference model."""
    from tests.models import reference

    optimizer_config = OptimizerConfig(
        learning_rate=1e-2, warmup_steps=2, weight_decay=0.5, clip_norm=0.7
    )
    config = dataclasses.replace(SHORT, overlap="ring", optimizer=optimizer_config, steps=4)
    trainer = Trainer(config, MESH)
    params = {name: np.asarray(leaf) for name, leaf in trainer.state["params"].items()}
    batches = open_dataset(None, None, sequence_length=64, batch_size=8, seed=0).iterator()

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 4, 1e-3)
    mask = {name: leaf.ndim > 1 for name, leaf in params.items()}
    expected = optax.chain(
        optax.clip_by_global_norm(0.7),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.5, mask=mask),
    )
    opt_state, expected_params = jax.jit(expected.init)(params), params
    gradient = jax.grad(
        lambda p, b: reference.loss(config.model, p, b["inputs"], b["targets"]).mean()
    )

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        updates, opt_state = expected.update(gradient(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(4):
        expected_params, opt_state = update(expected_params, opt_state, next(batches))
    trainer.run(4)
    for name, leaf in trainer.state["params"].items():
        # Adam's first steps change every weight by about the learning rate, so the sign of a
        # weight's change is random if its gradient is rounding noise: compare means.
        difference = np.abs(np.asarray(leaf) - np.asarray(expected_params[name]))
        assert np.mean(difference) < 2e-5, name
    assert int(trainer.state["step"]) == 4


def collectives(text: str) -> Counter:
    """Collectives in compiled HLO by kind; async starts count once."""
    kinds = "all-gather|reduce-scatter|collective-permute|all-reduce|all-to-all"
    return Counter(re.findall(rf"= \S+ ({kinds})(?:-start)?\(", text))


@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_compiled_step_has_rings_where_its_matmuls_communicate(layers):
    model = dataclasses.replace(SHORT.model, num_layers=layers)
    config = dataclasses.replace(SHORT, overlap="ring", model=model)
    trainer = Trainer(config, MESH)
    with record_decisions() as decisions:
        lowered = trainer.lowered()
    # On CPUs this pass removes the barriers early, and XLA merges the backward's permutes of an
    # operand with the forward's. On GPUs both stay.
    text = lowered.compile({"xla_disable_hlo_passes": "cse_barrier_expander"}).as_text()
    assert {decision.implementation for decision in decisions} == {"ring"}
    found = collectives(text)

    gather = make_schedule("gather", "one_way", MESH.tensor).permutes
    scatter = make_schedule("scatter", "one_way", MESH.tensor).permutes
    # A block gathers for q, k and v and for gate and up, and scatters after attention and after
    # down; the head gathers. Backward, a gather becomes a scatter with a co-gathered operand.
    forward = layers * 2 * (gather + scatter) + gather
    backward = layers * 2 * ((scatter + gather) + gather) + (scatter + gather)
    assert found["collective-permute"] == forward + backward
    # The embedding scatters forward and gathers backward, without a matmul. The loss gathers three
    # numbers per token.
    assert found["all-gather"] <= 2
    assert found["reduce-scatter"] <= 1


def test_xla_has_no_permute():
    trainer = Trainer(dataclasses.replace(SHORT, overlap="xla"), MESH)
    found = collectives(trainer.lowered().compile().as_text())
    assert found["collective-permute"] == 0
    assert found["all-gather"] > 1


def traced(config: Config) -> tuple:
    """A step before compilation, and the shapes of its arguments."""
    model = ModelFunctions(config)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    tokens = jax.ShapeDtypeStruct((config.batch_size, config.sequence_length), "int32")
    step = sharded_step(config, model, optimizer, make_abstract_mesh(MESH))
    return step, abstract_state(model, optimizer), {"inputs": tokens, "targets": tokens}


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrites steps with rings, which are not chosen on CPUs."""
    for module in (steps, explicit_step):
        monkeypatch.setattr(module, "overlap", functools.partial(overlap, implementation="ring"))


@pytest.mark.parametrize(
    ("changes", "recomputed"),
    [
        ({}, 0),
        ({"gradient_accumulation_steps": 2}, 0),
        ({"remat": "dots"}, 0),
        ({"remat": "projections"}, 1),  # The gather of gate and up.
        # A block's gathers and its first scatter; nothing needs the result of the second.
        ({"remat": "full"}, 3),
    ],
    ids=str,
)
def test_every_site_of_a_plain_model_is_replaced(rings, changes, recomputed):
    config = dataclasses.replace(SHORT, overlap="rewrite", compute_dtype="bfloat16", **changes)
    step, *arguments = traced(config)
    with record_decisions() as decisions:
        found = counts(step, *arguments)
    # Sites of one block, as all blocks are one function, and of the head; the same backward.
    assert len(decisions) == 2 * (4 + 1) + recomputed
    assert {decision.implementation for decision in decisions} == {"ring"}
    # The embedding scatters forward and gathers backward, without a matmul. To recompute everything
    # but the matmuls, the backward gathers arrays that it needs for weight gradients only.
    alone = {"dots": 2, "projections": 1}.get(config.remat, 0) * config.model.num_layers
    assert (found["all_gather"], found["reduce_scatter"]) == (1 + alone, 1)


@pytest.mark.parametrize("overlap", ["rewrite", "rewrite-jit"])
def test_a_rewritten_step_has_the_same_loss_curve_as_one_device(overlap, rings, one_device):
    curve = Trainer(dataclasses.replace(SHORT, overlap=overlap), MESH).run(5)
    np.testing.assert_allclose(curve["loss"], one_device["loss"][:5], rtol=3e-4)
    np.testing.assert_allclose(curve["grad_norm"], one_device["grad_norm"][:5], rtol=1e-3)


def test_a_step_with_a_site_that_is_not_replaced_is_refused(monkeypatch):
    # Adds a bias to each product before its scatter.
    tensordot = jax.numpy.tensordot
    monkeypatch.setattr(jax.numpy, "tensordot", lambda *args: tensordot(*args) + 1)
    config = dataclasses.replace(SHORT, overlap="rewrite", compute_dtype="bfloat16")
    step, *arguments = traced(config)
    with pytest.raises(ValueError, match=r"require=10: only \d ") as error:
        jax.eval_shape(step, *arguments)
    table = " ".join(str(error.value).split())
    assert re.search(r"plain\.py:\d+ in RowParallelLinear.__call__ .*? left alone", table)


def test_a_matmul_over_explicit_axes_that_is_not_replaced_is_refused(monkeypatch):
    tensordot = functools.partial(jax.numpy.tensordot, precision="highest")
    monkeypatch.setattr(jax.numpy, "tensordot", tensordot)
    step, *arguments = traced(dataclasses.replace(SHORT, overlap="rewrite-jit"))
    with pytest.raises(ValueError, match=r"require=5: only \d+ ") as error:
        jax.eval_shape(step, *arguments)
    table = " ".join(str(error.value).split())
    assert re.search(
        r"explicit/layers\.py:\d+ in RowParallelLinear.__call__ .*? asks for precision", table
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_gather": "blocks"}, "weight_gather='blocks': expected 'auto' with overlap="),
        ({"gradient_dtype": "bfloat16"}, "gradients travel in compute_dtype='float32'"),
        (
            {"fp8": "tensorwise", "overlap": "rewrite"},
            "fp8='tensorwise': with overlap='rewrite', gradients are part of the program",
        ),
    ],
)
def test_what_rewritten_models_do_not_do_is_refused(changes, message):
    config = dataclasses.replace(SHORT, **{"overlap": "rewrite-jit", **changes})
    with pytest.raises(ValueError, match=message):
        check(config, ONE_DEVICE)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [(MESH, {}), (MeshSizes(1, 2, 2), {"zero": 3, "weight_gather": "matmuls", "scan_layers": 1})],
    ids=str,
)
def test_initial_weights_are_the_same_on_every_mesh(sizes, changes):
    config = dataclasses.replace(SHORT, **changes)
    model = ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    weights = init_state(model, optimizer, make_mesh(sizes))["params"]
    expected = Trainer(config, ONE_DEVICE).state["params"]
    assert weights.keys() == expected.keys()
    for name in weights:
        np.testing.assert_array_equal(weights[name], expected[name], err_msg=name)
