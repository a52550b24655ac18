"""PyTorch's training step computes what the trainer's does, however it is parallelized."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.pytorch import FIRST_STEPS
from benchmarks.pytorch.runner import time_pytorch
from benchmarks.step.train import TrainCase
from train.checkpoint.new_state import init_state
from train.config.config import ONE_DEVICE
from train.optimizer.optimizer import make_optimizer
from train.parallel.loss import batch_losses
from train.parallel.mesh import make_mesh
from train.parallel.model import ModelFunctions
from train.step import make_step

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from benchmarks.pytorch.llama.torch_training import TorchTraining  # noqa: E402
from benchmarks.pytorch.torch_programs import Place  # noqa: E402

CANDIDATES = ("torch_fsdp", "torch_tp", "torch_tp_bf16")
REMATS: tuple[Any, ...] = ("none", "dots", "full")
#: Frequencies are scaled from the first waves on, and there are two microbatches.
FLAGS = (
    "--model.rotary-scaling.factor 8 --model.rotary-scaling.original-context 16"
    " --gradient-accumulation-steps 2"
)
#: PyTorch's model has no balancing loss.
EXPERTS = (
    " --model.num-experts 4 --model.num-experts-per-token 2 --model.query-key-norm"
    " --balance-loss-weight 0 --expert-axes fsdp"
)
#: Logits of fewer tokens than there are, and then of the rest.
CHUNKS = " --loss-chunk 48"
#: What is placed in another way by tensor parallelism and by sharded weights.
COVERING = [("none", 0, ""), ("dots", 0, CHUNKS), ("full", 3, CHUNKS)]
FLOAT8 = ("torch_tp", "torch_tp_fp8_tensorwise", "torch_async_tp_fp8_rowwise")
FLOAT8_CASE = TrainCase("debug", 1, 32, 2, "none", 0, "", FLOAT8)
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def case_of(remat: Any, zero: Any = 0, flags: str = FLAGS) -> TrainCase:
    return TrainCase("debug", 2, 32, 4, remat, zero, flags, CANDIDATES)


def described(case: TrainCase) -> dict[str, Any]:
    description = case.for_pytorch()
    assert description is not None
    return {"name": case.name, **description}


def alone(case: TrainCase) -> Any:
    """The whole model on this device, in float32."""
    place, step = Place(0, 1, torch.device("cpu")), described(case)
    return TorchTraining(step, step["candidates"][0], place, torch.float32, None)


def for_torch(parameters: dict[str, Any]) -> dict[str, Any]:
    """JAX's parameters by their names in PyTorch, whose weights are [out, in]."""
    renamed = {}
    for name, parameter in parameters.items():
        array = np.asarray(parameter)
        if name.endswith("output.kernel"):
            array = array.reshape(-1, array.shape[-1]).T
        elif ".w_" in name:  # Of experts.
            array = array.swapaxes(1, 2)
        elif name.endswith("kernel"):
            array = array.reshape(array.shape[0], -1).T
        name = name.replace(".projection", "").replace("kernel", "weight")
        name = name.replace(".w_", ".").replace(".experts.", ".feed_forward.")
        renamed["embedding.weight" if name == "embedding" else name] = torch.tensor(array.copy())
    return renamed


@pytest.mark.parametrize(("flags", "zero"), [(FLAGS, 0), (FLAGS + EXPERTS, 3)])
def test_a_step_is_the_trainers(flags: str, zero: Any) -> None:
    case, mesh = case_of("none", zero, flags), make_mesh(ONE_DEVICE)
    config = case.config("xla", "float32")
    model = ModelFunctions(config)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state = init_state(model, optimizer, mesh)
    weights = for_torch(state["params"])
    trainings = [alone(case_of(remat, zero, flags)) for remat in REMATS]
    inputs, targets = np.concatenate(trainings[0].batches, axis=1).astype("int32")
    batch = {"inputs": inputs, "targets": targets}

    def mean_loss(params: Any, batch: Any) -> Any:
        return batch_losses(model, params, batch).mean()

    grad = jax.shard_map(
        jax.grad(mean_loss), mesh=mesh, in_specs=(model.specs, P()), out_specs=model.specs
    )
    gradients = for_torch(jax.jit(grad)(state["params"], batch))
    step, curve = make_step(config, model, optimizer, mesh), []
    for _ in range(FIRST_STEPS):
        state, metrics = step(state, batch)
        curve.append(float(metrics["loss"]))
    assert curve[-1] < curve[0] - 0.5
    for training in trainings:
        parameters = {
            name.replace("_checkpoint_wrapped_module.", ""): parameter
            for name, parameter in training.model.named_parameters()
        }
        assert parameters.keys() == weights.keys()
        for name, parameter in parameters.items():
            parameter.data.copy_(weights[name])
        training.backward()
        for name, parameter in parameters.items():
            error = float((parameter.grad - gradients[name]).norm() / gradients[name].norm())
            # Sums of hundreds of terms in another order, in float32.
            assert error < 1e-5
        training.optimizer.zero_grad()
        for _ in range(FIRST_STEPS):
            training.step()
        # AdamW divides by the size of gradients, which makes rounding of small ones larger.
        np.testing.assert_allclose(training.losses, curve, rtol=1e-5)


def results_of(
    configurations: list[tuple[Any, Any, str]], flags: str = FLAGS
) -> list[dict[str, Any]]:
    cases = [case_of(remat, zero, flags + more) for remat, zero, more in configurations]
    cases += [FLOAT8_CASE] if configurations is COVERING and HAS_TORCHAO else []
    results, reason = time_pytorch(
        [described(case) for case in cases],
        devices=2,
        platform="cpu",
        dtype="float32",
        groups=2,
        group_seconds=1e-6,
        limit_seconds=200.0,
    )
    assert reason is None
    assert [result.get("failure") for result in results] == [None] * len(results)
    return results


@pytest.fixture(scope="module")
def covering() -> list[dict[str, Any]]:
    return results_of(COVERING)


def assert_losses_are_those_of_one_device(
    results: list[dict[str, Any]], case: TrainCase | None = None
) -> None:
    training = alone(case or case_of("none"))
    for _ in range(FIRST_STEPS):
        training.step()
    for result in results:
        assert len(result["samples"]) == 2
        # Rounding as above.
        np.testing.assert_allclose(result["losses"], training.losses, rtol=1e-6)


def test_parallel_steps_are_those_of_one_device(covering: list[dict[str, Any]]) -> None:
    assert_losses_are_those_of_one_device(covering[: 2 + 2 + 1])


def test_steps_of_divided_experts_are_those_of_one_device() -> None:
    results = results_of([("none", 3, EXPERTS)])
    assert [result["candidate"] for result in results] == ["torch_fsdp"]
    assert_losses_are_those_of_one_device(results, case_of("none", 3, FLAGS + EXPERTS))


@pytest.mark.exhaustive
def test_every_parallel_step_is_that_of_one_device() -> None:
    results = results_of([(remat, zero, "") for remat in REMATS for zero in (0, 3)])
    assert len(results) == 3 * (2 + 1)
    assert_losses_are_those_of_one_device(results)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_steps_in_float8_learn_as_others_do(covering: list[dict[str, Any]]) -> None:
    plain, *quantized = (np.array(result["losses"]) for result in covering[-3:])
    for losses in quantized:
        # The batch is learned by heart; rounding to float8 is a part of each product.
        assert 1e-4 < np.abs(losses - plain).max() < 0.1 < plain[0] - plain[-1]
