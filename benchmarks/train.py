"""``python -m benchmarks train``: the trainer's whole step, by every way to overlap.

The candidates "baseline" and "xla" are the same step: xla is compiled as rings are, the baseline
with XLA's own options, of which the fastest set counts. All candidates take turns with one state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from benchmarks import candidates, comparison
from benchmarks.candidates import Candidate
from benchmarks.communication import CollectiveMatmul, Communication, Rewritten
from benchmarks.comparison import Comparison
from benchmarks.internals import COMPUTE_ONLY, REFERENCE
from benchmarks.operands import Operands
from benchmarks.programs import Program
from benchmarks.report import Report
from benchmarks.settings import check_names
from models.llama import Remat
from train.config import PRESETS, Config, MeshSizes
from train.mesh import make_mesh
from train.metrics import model_flops_per_token, peak_flops
from train.state import ModelFunctions, init_state, make_optimizer, state_on_mesh
from train.step import BATCH_SPEC, sharded_step

CANDIDATES = tuple(
    name for name in candidates.layer_names() if name not in ("windowed_einsum", COMPUTE_ONLY)
)


@dataclass(frozen=True)
class TrainCase:
    """One step of one configuration."""

    preset: str
    layers: int
    tokens: int
    sequences: int
    remat: Remat

    @property
    def name(self) -> str:
        return f"{self.preset} {self.layers} layers {self.sequences}×{self.tokens}"

    def config(self, overlap: str = "auto", dtype: str = "bfloat16") -> Config:
        """The trainer's configuration."""
        preset = PRESETS[self.preset]()
        return dataclasses.replace(
            preset,
            model=dataclasses.replace(preset.model, num_layers=self.layers),
            sequence_length=self.tokens,
            batch_size=self.sequences,
            remat=self.remat,
            overlap=overlap,
            compute_dtype=dtype,
        )

    @property
    def divided_sizes(self) -> dict[str, int]:
        return {"sequence_length": self.tokens, **self.config().model.sharded_sizes}

    def describe(self, operands: Operands) -> dict[str, Any]:
        model = self.config().model
        flops = model_flops_per_token(
            matmul_parameters=model.matmul_parameters,
            layers=model.num_layers,
            heads=model.num_heads,
            head_dim=model.head_dim,
            sequence_length=self.tokens,
        )
        kind = operands.mesh.devices.flat[0].device_kind
        return {
            **asdict(self),
            "tokens_per_step": self.sequences * self.tokens,
            "flops_per_token": flops,
            "peak_flops": peak_flops(kind),
        }

    def build(self, operands: Operands, candidate: Candidate) -> Program:
        """``(state, batch) -> (state, metrics)``."""
        config = self.config(_overlap_of(candidate.communication), operands.dtype.name)
        mesh = make_mesh(MeshSizes(tensor=operands.mesh.devices.size))
        model = ModelFunctions(config)
        optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
        tokens = jax.ShapeDtypeStruct(
            (config.batch_size, config.sequence_length),
            "int32",
            sharding=NamedSharding(mesh, BATCH_SPEC),
        )

        def make() -> Training:
            vocabulary = config.model.vocabulary_size
            batch = {
                "inputs": _random(tokens, vocabulary, 0),
                "targets": _random(tokens, vocabulary, 1),
            }
            return Training(init_state(model, optimizer, mesh), batch)

        return Program(
            sharded_step(config, model, optimizer, mesh),
            (state_on_mesh(model, optimizer, mesh), {"inputs": tokens, "targets": tokens}),
            donated=(0,),
            make=make,
        )


def _overlap_of(communication: Communication) -> str:
    """The name in the trainer's configuration; the trainer rewrites its steps by itself."""
    if isinstance(communication, CollectiveMatmul):
        return communication.implementation or "auto"
    return "rewrite" if isinstance(communication, Rewritten) else REFERENCE.name


def _random(tokens: jax.ShapeDtypeStruct, vocabulary: int, seed: int) -> jax.Array:
    def make() -> jax.Array:
        return jax.random.randint(jax.random.key(seed), tokens.shape, 0, vocabulary)

    return jax.jit(make, out_shardings=tokens.sharding)()


class Training:
    """One state, which every step replaces."""

    def __init__(self, state: Any, batch: dict[str, jax.Array]):
        self.state, self.batch = state, batch

    def bind(self, compiled: Callable, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        """A function that takes one step with a compiled program and returns its metrics."""
        return functools.partial(self._step, compiled)

    def _step(self, compiled: Callable) -> Any:
        self.state, metrics = compiled(self.state, self.batch)
        return metrics


@dataclass(frozen=True, kw_only=True)
class Train(Comparison):
    """A whole training step."""

    preset: str = "llama3-8b"
    """Which model: debug, llama3-8b, llama3-70b, llama3-405b."""
    layers: int = 8
    """Layers of the model, which is cut to that many."""
    sequence_lengths: tuple[int, ...] = (8192,)
    """Tokens per sequence."""
    sequences: int = 1
    """Sequences per step."""
    remat: Remat = "none"
    """What the backward recomputes: none, dots, full."""
    group_seconds: float = 0.5

    def cases(self) -> list[TrainCase]:
        """One candidate for each length."""
        return [
            TrainCase(self.preset, self.layers, tokens, self.sequences, self.remat)
            for tokens in self.sequence_lengths
        ]


def run(settings: Train) -> Report:
    """Measures every case; returns the report.

    Raises:
      ValueError: for settings that do not fit together or to the devices.
    """
    check_names("preset", (settings.preset,), list(PRESETS))
    return comparison.run("train", settings, settings.cases(), CANDIDATES)
