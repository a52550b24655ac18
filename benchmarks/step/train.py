"""``python -m benchmarks train``: the trainer's whole step, by every way to overlap.

The candidates "baseline" and "xla" are the same step: xla is compiled as rings are, the baseline
with XLA's own options, of which the fastest set counts. All candidates take turns with one state.
Those of PyTorch do not, and run before JAX takes the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import tyro
from jax.sharding import NamedSharding

from benchmarks.comparison import candidates, comparing
from benchmarks.comparison.candidates import Candidate
from benchmarks.comparison.communication import (
    CollectiveMatmul,
    Communication,
    ExplicitAxes,
    Rewritten,
)
from benchmarks.comparison.comparing import Fp8Comparison
from benchmarks.comparison.operands import Operands
from benchmarks.comparison.programs import Program
from benchmarks.internals import COMPUTE_ONLY, REFERENCE, RecipeName, attention_choice
from benchmarks.measuring import tables
from benchmarks.measuring.report import Report
from benchmarks.measuring.settings import check_least, check_names
from benchmarks.pytorch import TRAINING_NAMES, runner
from models.blocks.rematerialization import Remat
from models.layers import rotary
from train.checkpoint.new_state import init_state
from train.config.checks import check
from train.config.config import Config, MeshConfig, MeshSizes, Zero
from train.config.presets import PRESETS
from train.log.metrics import peak_flops
from train.optimizer.optimizer import make_optimizer
from train.optimizer.state import WEIGHTS, TrainState, state_on_mesh, weights_adder
from train.parallel.batches import batch_specs
from train.parallel.mesh import make_mesh, mesh_sizes
from train.parallel.model import ModelFunctions
from train.step import sharded_step

CANDIDATES = tuple(
    name for name in candidates.layer_names() if name not in ("windowed_einsum", COMPUTE_ONLY)
)


@dataclass(frozen=True)
class TrainCase:
    """One step of one configuration. With `zero`, weights are sharded, and tensors are not."""

    preset: str
    layers: int
    tokens: int
    sequences: int
    remat: Remat
    zero: Zero = 0
    trainer: str = ""
    baselines: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        name = f"{self.preset} {self.layers} layers {self.sequences}×{self.tokens}"
        name += f" ZeRO {self.zero}" if self.zero else ""
        return name + (f" remat {self.remat}" if self.remat != "none" else "")

    def config(
        self,
        overlap: str = "auto",
        dtype: str = "bfloat16",
        fp8: RecipeName | None = None,
        attention: str | None = None,
    ) -> Config:
        """The trainer's configuration; what is None here is that of the trainer's flags."""
        preset = tyro.cli(Config, default=PRESETS[self.preset](), args=shlex.split(self.trainer))
        return dataclasses.replace(
            preset,
            model=dataclasses.replace(preset.model, num_layers=self.layers),
            sequence_length=self.tokens,
            batch_size=self.sequences,
            zero=self.zero,
            remat=self.remat,
            overlap=overlap,
            compute_dtype=dtype,
            fp8=fp8 or preset.fp8,
            attention=attention or preset.attention,
        )

    def mesh_sizes(self, devices: int) -> MeshSizes:
        """Mesh sizes of the trainer's flags; else one axis: fsdp with ZeRO, tensor without."""
        config = self.config()
        sizes = MeshSizes(fsdp=devices) if self.zero else MeshSizes(tensor=devices)
        if config.mesh != MeshConfig():
            sizes = mesh_sizes(config, devices)
        if sizes.devices != devices:
            raise ValueError(f"devices={devices}: the trainer's mesh is {sizes}; make them equal")
        check(config, sizes)
        return sizes

    @property
    def divided_sizes(self) -> dict[str, int]:
        if self.config().mesh != MeshConfig():
            return {}  # Another mesh, which the trainer checks.
        if self.zero:
            return {"sequences": self.sequences}
        return {"sequence_length": self.tokens, **self.config().model.sharded_sizes}

    def describe(self, operands: Operands) -> dict[str, Any]:
        sizes = self.mesh_sizes(operands.mesh.devices.size)
        model = ModelFunctions(self.config(), sizes, jax.local_device_count())
        flops = model.flops_per_token(self.tokens)
        kind = operands.mesh.devices.flat[0].device_kind
        return {
            **asdict(self),
            "tokens_per_step": self.sequences * self.tokens,
            "flops_per_token": flops,
            "peak_flops": peak_flops(kind),
        }

    def for_pytorch(self) -> dict[str, Any] | None:
        """See `benchmarks.pytorch.runner.PytorchCase`."""
        config = self.config()
        known = [
            name
            for name in TRAINING_NAMES.get(self.zero, ())
            if (name == "torch_context") == (config.mesh.context > 1)
        ]
        if config.model.num_experts is not None:  # Experts over the devices that shard weights.
            known = [name for name in known if name == "torch_fsdp"]
        if self.remat in ("projections", "attention"):  # PyTorch's side has no such policy.
            known = []
        names = [name for name in known if name in self.baselines]
        step = {**config.to_json(), "frequencies": rotary.frequencies(config.model).tolist()}
        return {**step, "candidates": names} if names else None

    def build(self, operands: Operands, candidate: Candidate) -> Program:
        """``(state, batch) -> (state, metrics)``."""
        communication = candidate.communication
        fp8 = getattr(communication, "fp8", None)
        attention = getattr(communication, "attention", None)
        config = self.config(_overlap_of(communication), operands.dtype.name, fp8, attention)
        sizes = self.mesh_sizes(operands.mesh.devices.size)
        check(config, sizes)
        # XLA's own programs are those that `jax.jit` compiles.
        rewrite = candidate.compiler != "jit"
        if not rewrite:  # It gathers rows of weights without transposes.
            config = dataclasses.replace(config, weight_gather="blocks")
        mesh, model = make_mesh(sizes), ModelFunctions(config, sizes, jax.local_device_count())
        optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
        tokens = jax.ShapeDtypeStruct(
            (config.batch_size, config.sequence_length),
            "int32",
            sharding=NamedSharding(mesh, batch_specs(["inputs"], mesh)["inputs"]),
        )

        def make() -> Training:
            vocabulary = config.model.vocabulary_size
            batch = {
                "inputs": _random(tokens, vocabulary, 0),
                "targets": _random(tokens, vocabulary, 1),
            }
            return Training(init_state(model, optimizer, mesh), batch)

        return Program(
            sharded_step(config, model, optimizer, mesh, rewrite=rewrite),
            (state_on_mesh(model, optimizer, mesh), {"inputs": tokens, "targets": tokens}),
            donated=(0,),
            make=make,
        )


def _overlap_of(communication: Communication) -> str:
    """The name in the trainer's configuration; the trainer rewrites its steps by itself."""
    if isinstance(communication, CollectiveMatmul):
        return communication.implementation or "auto"
    if isinstance(communication, ExplicitAxes):
        return "rewrite-jit"
    return "rewrite" if isinstance(communication, Rewritten) else REFERENCE.name


def _random(tokens: jax.ShapeDtypeStruct, vocabulary: int, seed: int) -> jax.Array:
    def make() -> jax.Array:
        return jax.random.randint(jax.random.key(seed), tokens.shape, 0, vocabulary)

    return jax.jit(make, out_shardings=tokens.sharding)()


class _Placing:
    """Moves a state to where a program wants it. What does so is compiled once.

    Args:
      wanted: the program's state.
    """

    def __init__(self, wanted: TrainState):
        self._wanted = wanted
        self._add_weights = weights_adder(wanted)

    def __call__(self, state: TrainState) -> TrainState:
        moved = {
            name: jax.tree.map(_moved, part, self._wanted[name])
            for name, part in state.items()
            if name != WEIGHTS
        }
        return self._add_weights(moved)


def _moved(array: jax.Array, wanted: jax.Array) -> jax.Array:
    """The array with the sharding of another; the old one is freed.

    A program moves it from device to device, where `jax.device_put` goes through the host.
    """
    if array.sharding.is_equivalent_to(wanted.sharding, array.ndim):
        return array
    moved = _move_to(wanted.sharding)(array)
    array.delete()
    return moved


@functools.cache
def _move_to(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


class Training:
    """One state, which every step replaces. A program that shards it otherwise moves it first.

    The first step of each program is the first of a schedule, whose learning rate is 0 unless there
    is no warm-up. So it finds the same parameters and leaves them: loss and gradient norm of all
    programs can be compared.

    Attributes:
      state: the train state.
      batch: of every step.
      first_metrics: of the first step of each program.
      losses: of all other steps.
    """

    def __init__(self, state: Any, batch: dict[str, jax.Array]):
        self.state, self.batch = state, batch
        self.first_metrics: dict[Callable, dict[str, jax.Array]] = {}
        self.losses: list[jax.Array] = []
        self._previous: Callable | None = None
        self._counts = [jax.device_get(leaf) for leaf in jax.tree.leaves(state) if not leaf.ndim]

    def bind(self, compiled: Callable, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """A function that takes one step with a compiled program and returns its metrics."""
        return functools.partial(self._step, compiled, _Placing(arguments[0]))

    def _step(self, compiled: Callable, place: _Placing) -> Any:
        if compiled is not self._previous:  # Calls after another program's are not timed.
            self._previous = compiled
            self.state = place(self.state)
        is_first = compiled not in self.first_metrics
        if is_first:
            self._begin_again()
        self.state, metrics = compiled(self.state, self.batch)
        if is_first:
            self.first_metrics[compiled] = metrics
        else:
            self.losses.append(metrics["loss"])
        return metrics

    def _begin_again(self) -> None:
        """Sets all counts of steps to those of the first state."""
        counts = iter(self._counts)

        def first(leaf: jax.Array) -> jax.Array:
            return leaf if leaf.ndim else jax.device_put(next(counts), leaf.sharding)

        self.state = jax.tree.map(first, self.state)


@dataclass(frozen=True, kw_only=True)
class Train(Fp8Comparison):
    """A whole training step."""

    preset: str = "llama3-8b"
    """Which model: debug, llama3-8b, llama3-70b, llama3-405b."""
    layers: int = 8
    """Layers of the model, which is cut to that many."""
    sequence_lengths: tuple[int, ...] = (8192,)
    """Tokens per sequence."""
    sequences: int = 1
    """Sequences per step."""
    remat: tuple[Remat, ...] = ("none",)
    """What the backward recomputes: none, dots, full."""
    zero: tuple[Zero, ...] = (0,)
    """ZeRO levels; 0 is tensor parallelism, others shard weights over all devices."""
    trainer: str = ""
    """Other flags of the trainer, such as --trainer="--gradient-accumulation-steps 2"."""
    baselines: tuple[str, ...] = ()
    """Before, time PyTorch in processes of its own: torch_fsdp for ZeRO 3, torch_context for it and
    a context axis; for 0 torch_tp, torch_async_tp, both with _bf16, or with _fp8_tensorwise or
    _fp8_rowwise by torchao."""
    attention: tuple[str, ...] = ()
    """Kernels of attention: flash3, cudnn, xla. The library's own choice takes part once more with
    each, as in auto_attention_cudnn."""
    group_seconds: float = 0.5

    def cases(self) -> list[TrainCase]:
        """Every length × remat × ZeRO level."""
        one = functools.partial(TrainCase, trainer=self.trainer, baselines=self.baselines)
        return [
            one(self.preset, self.layers, tokens, self.sequences, remat, zero)
            for tokens in self.sequence_lengths
            for remat in self.remat
            for zero in self.zero
        ]


def run(settings: Train) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check_names("preset", (settings.preset,), list(PRESETS))
    check_names("baselines", settings.baselines, sum(TRAINING_NAMES.values(), ()))
    check_names("candidates", settings.candidates, CANDIDATES)
    check_names("attention", settings.attention, list(attention_choice.KERNELS))
    settings, names = settings.with_fp8(), candidates.with_fp8(CANDIDATES, settings.fp8)
    chosen = candidates.with_attention(settings.candidates, settings.attention)
    names = candidates.with_attention(names, settings.attention)
    settings = dataclasses.replace(settings, candidates=chosen)
    cases, found = settings.cases(), {}
    if settings.baselines:
        check_least(settings, 2, "devices")
        comparing.check_divisible(cases, settings.devices)
        found = runner.results_of(settings, cases, settings.devices, settings.limit_seconds)
    report = comparing.run("train", settings, cases, names)
    for (case, name), result in found.items():
        report.add_result(case, name, result)
    print(tables.training_steps(report.content))
    return report
