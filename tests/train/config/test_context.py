"""Sequences that a context axis divides: the same curves as one device, layout and memory."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from collective_matmul import zigzag_order
from collective_matmul.ops.attention.context.backends import BACKENDS as REGISTERED
from models.layers.documents import locate_documents, locate_part
from tests.covering import covering
from tests.models.hugging_face.folders import DATA
from tests.train.test_step import SHORT, Trainer
from train.config.config import ONE_DEVICE, Config, MeshSizes, OptimizerConfig
from train.config.context import BACKENDS, context_implementation, describe_context
from train.log.log_file import read_log
from train.memory.device_memory import GPUS
from train.memory.step_memory import memory_of
from train.optimizer.state import TrainState, state_on_mesh
from train.parallel.batches import global_arrays, local_rows
from train.parallel.mesh import make_abstract_mesh, make_mesh
from train.parallel.model import ModelFunctions
from train.run.command_line import main
from train.run.dry_run import dry_run

MODEL = dataclasses.replace(
    SHORT.model, num_layers=2, features=32, hidden_features=48, num_heads=8, num_key_value_heads=4,
    head_dim=4,
)  # fmt: skip
EXPERTS = {
    "family": "mixtral", "num_experts": 8, "num_experts_per_token": 2, "router_loss_weight": 0.05,
}  # fmt: skip
RUN = dataclasses.replace(SHORT, model=MODEL, batch_size=8, sequence_length=32, overlap="xla")
STEPS, DOCUMENTS = 4, 5


def batch_of(step: int, kind: str) -> dict[str, np.ndarray]:
    """A batch of random text: without documents, with some, or with answers among them.

    Documents end anywhere, within chunks of devices and at their ends, and some have one token.
    """
    rng = np.random.default_rng(step)
    rows, tokens = RUN.batch_size, RUN.sequence_length
    text = rng.integers(0, 40, size=(rows, tokens + 1), dtype=np.int32)
    batch = {"inputs": text[:, :-1], "targets": text[:, 1:]}
    if kind != "text":
        cuts = np.sort(rng.integers(0, tokens + 1, size=(rows, DOCUMENTS - 1)), axis=1)
        cuts[0], cuts[1] = [4, 8, 16, 17], tokens
        ends = np.concatenate([cuts, np.full((rows, 1), tokens)], axis=1)
        lengths = np.diff(ends, axis=1, prepend=0)
        # Those of no token are at the end.
        ordered = np.take_along_axis(lengths, np.argsort(lengths == 0, axis=1, kind="stable"), 1)
        batch["document_lengths"] = ordered.astype(np.int32)
    if kind == "chats":
        batch["answers"] = rng.integers(0, 2, size=(rows, tokens), dtype=np.int32)
        # Some devices have nothing to learn from.
        batch["answers"][::2, :20] = 0
    return batch


class ContextTrainer(Trainer):
    """A trainer on batches of one kind, with the initial state of one device."""

    def __init__(self, config: Config, sizes: MeshSizes, kind: str, initial: TrainState):
        self.kind, self.initial = kind, initial
        super().__init__(config, sizes)

    def restart(self):
        # Making it takes as long to compile as the step.
        abstract = state_on_mesh(self.model, self.optimizer, self.mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        self.state = jax.device_put(self.initial, shardings)
        self.steps = itertools.count()

    def batch(self):
        batch = batch_of(next(self.steps), self.kind)
        return global_arrays(batch, self.mesh, len(batch["inputs"]))


class WholeTrainer(Trainer):
    """A trainer on one device, whose batches of all kinds have one program.

    Text is one document, and every token is to be learnt.
    """

    def restart(self):
        super().restart()
        self.initial = jax.device_get(self.state)

    def curve(self, kind: str) -> dict[str, np.ndarray]:
        """The metrics of each step on batches of one kind."""
        self.state = jax.device_put(self.initial)
        self.steps, self.kind = itertools.count(), kind
        return self.run(STEPS)

    def batch(self):
        batch = batch_of(next(self.steps), self.kind)
        rows, tokens = batch["inputs"].shape
        whole = np.zeros((rows, DOCUMENTS), np.int32)
        whole[:, 0] = tokens
        batch.setdefault("document_lengths", whole)
        batch.setdefault("answers", np.ones((rows, tokens), np.int32))
        return global_arrays(batch, self.mesh, rows)


def config_of(case: dict[str, Any]) -> Config:
    """The configuration of a case, whose further keys are flags."""
    changes = {name: case[name] for name in case if name not in ("sizes", "kind", "model")}
    kind = changes.pop("optimizer", "adamw")
    optimizer = OptimizerConfig(kind=kind, muon_dtype="float32", warmup_steps=1)
    model = dataclasses.replace(MODEL, **dict(case.get("model", ())))
    return dataclasses.replace(RUN, model=model, optimizer=optimizer, **changes)


@functools.cache
def trainer_of_one_device(model: tuple, **changes: Any) -> WholeTrainer:
    config = config_of({"model": model, **changes})
    return WholeTrainer(config, ONE_DEVICE)


def curves_of(case: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The metrics of a case, and those of one device."""
    alike = "optimizer", "fp8", "fp8_layers", "scan_layers"
    shared = {name: case[name] for name in alike if name in case}
    one = trainer_of_one_device(case.get("model", ()), **shared)
    sizes = MeshSizes(*case["sizes"])
    parts = ContextTrainer(config_of(case), sizes, case["kind"], one.initial)
    return parts.run(STEPS), one.curve(case["kind"])


def assert_curve_of_one_device(case: dict[str, Any]) -> None:
    curve, expected = curves_of(case)
    for name in expected:
        # Everything is float32, and meshes differ in the order of sums: a relative error of about
        # 1e-6 in a gradient, of which Adam's first steps keep the signs. Measured, curves of four
        # steps differ by at most 2e-6. A gradient that is summed once too often, a position or a
        # document of another token changes the first loss or norm by a percent and more.
        np.testing.assert_allclose(curve[name], expected[name], rtol=5e-5, err_msg=name)


WINDOW = (("family", "mistral"), ("sliding_window", 7))
#: Sinks, and layers of two kinds.
SINKS = (
    ("attention_sinks", True), ("output_bias", True), ("sliding_window", 7),
    ("full_attention_period", 2),
)  # fmt: skip


def test_a_run_has_the_curve_of_one_device():
    case = {"sizes": (1, 2, 2, 2), "kind": "chats", "model": WINDOW, "zero": 3}
    assert_curve_of_one_device(case | {"scan_layers": 1, "loss_chunk": 6})


@pytest.mark.exhaustive
def test_sinks_and_layers_of_two_kinds_have_the_curve_of_one_device():
    assert_curve_of_one_device({"sizes": (1, 2, 2, 2), "kind": "text", "model": SINKS, "zero": 2})


def covering_cases() -> list[dict[str, Any]]:
    """All pairs of a mesh and settings."""
    factors: dict[str, list[Any]] = {
        "sizes": [(1, 1, 1, 4), (2, 1, 2, 2), (1, 2, 2, 2)],
        # Chats are documents too.
        "kind": ["text", "chats"],
        "model": [(), WINDOW, SINKS, tuple(EXPERTS.items())],
        "zero": [0, 1, 3],
        "gradient_accumulation_steps": [1, 2],
        "remat": ["dots", "full"],
        "overlap": ["xla", "ring"],
        "loss_chunk": [None, 5],
        "context_attention": ["gather", "ulysses,xla", "ring"],
    }
    cases = [dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())]
    few = [cases[number] for number in np.random.default_rng(0).choice(len(cases), 1000, False)]
    scanned = [{"scan_layers": 1, **case} for case in covering(few, lambda case: case)]
    experts = {"sizes": (1, 2, 2, 2), "kind": "chats", "model": tuple(EXPERTS.items()), "zero": 2}
    return [
        *scanned,
        {"sizes": (1, 2, 1, 4), "kind": "documents", "zero": 3, "optimizer": "muon"},
        # Experts over fsdp, whose number the context axis does not divide further.
        {**experts, "expert_axes": "both", "scan_layers": 1},
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", covering_cases(), ids=lambda case: "-".join(map(str, case.values()))
)
def test_every_pair_of_settings_has_the_curve_of_one_device(case):
    assert_curve_of_one_device(case)


@pytest.mark.exhaustive
def test_fp8_on_parts_of_sequences_is_near_that_of_one_device():
    changes = {"fp8": "rowwise", "fp8_layers": "*", "zero": 3, "scan_layers": 1}
    parts, one = curves_of({"sizes": (1, 1, 2, 4), "kind": "documents", **changes})
    # Rows have scales of their own on every mesh, but sums in another order move some values of 8
    # bits to the next one, by 6 %, in one of many terms.
    np.testing.assert_allclose(parts["loss"], one["loss"], rtol=3e-3)


def test_what_sends_keys_and_values_is_named_or_follows_overlap():
    assert {*BACKENDS} == {*REGISTERED}
    for overlap, named, expected in (
        ("auto", "auto", None),
        ("ring", "auto", ("ring",)),
        ("fused,ring_two_way,xla", "auto", ("xla",)),
        ("ring", "ulysses,gather", ("ulysses", "gather")),
    ):
        config = dataclasses.replace(RUN, overlap=overlap, context_attention=named)
        assert context_implementation(config) == expected


def sharding_of(array: jax.Array) -> NamedSharding:
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    return sharding


def test_tokens_are_laid_out_in_zigzag_order():
    mesh = make_mesh(MeshSizes(2, 1, 1, 4))
    batch = batch_of(0, "chats")
    placed = global_arrays(batch, mesh, RUN.batch_size)
    order = zigzag_order(RUN.sequence_length, 4)
    for name in ("inputs", "targets", "answers"):
        np.testing.assert_array_equal(placed[name], batch[name][:, order])
        assert sharding_of(placed[name]).spec == P(("data", "fsdp"), "context")
    np.testing.assert_array_equal(placed["document_lengths"], batch["document_lengths"])
    # Each process reads the sequences of its devices once.
    rows = local_rows(mesh, RUN.batch_size)
    np.testing.assert_array_equal(rows, range(RUN.batch_size))


@pytest.mark.parametrize("kind", ["text", "documents"])
def test_positions_and_documents_are_those_of_the_same_tokens(make_mesh, kind):
    tokens, lengths = RUN.sequence_length, batch_of(0, kind).get("document_lengths")
    mesh = make_mesh({"context": 4})

    def local(lengths):
        part = locate_part(lengths, tokens // 4, "context")
        ids = part.positions * 0 if part.segments is None else part.segments.ids
        return part.positions, ids

    spec = P(None, "context")
    located = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=(spec, spec))
    positions, ids = jax.jit(located)(lengths)
    order = zigzag_order(tokens, 4)
    if lengths is None:
        np.testing.assert_array_equal(positions[0], order)
        return
    expected = jax.jit(locate_documents, static_argnums=1)(lengths, tokens)
    np.testing.assert_array_equal(positions, np.asarray(expected.positions)[:, order])
    np.testing.assert_array_equal(ids, np.asarray(expected.segments.ids)[:, order])


def test_weights_and_moments_are_sharded_over_fsdp_and_context():
    model = ModelFunctions(dataclasses.replace(RUN, zero=1), MeshSizes(1, 2, 2, 2))
    assert model.specs["embedding"] == P("tensor", ("fsdp", "context"))
    assert model.specs["layers.0.attention.projection.query.kernel"] == P(
        ("fsdp", "context"), "tensor", None
    )
    assert model.gathers is None and not model.whole_matrices
    # Over the context axis alone too.
    alone = ModelFunctions(dataclasses.replace(RUN, zero=3), MeshSizes(1, 1, 1, 8))
    assert alone.zero == 3 and alone.gathers == "blocks"
    assert alone.specs["embedding"] == P("tensor", ("fsdp", "context"))


def test_a_dry_run_knows_the_parts():
    """Activations of a part are a part of them, and the table has the attention."""
    # Wide enough that activations are more than weights and the tiles of attention.
    model = dataclasses.replace(
        SHORT.model, num_layers=2, features=1024, hidden_features=4096, head_dim=64
    )
    changes = {"batch_size": 1, "sequence_length": 32_768, "compute_dtype": "bfloat16"}
    config = dataclasses.replace(SHORT, model=model, overlap="auto", scan_layers=1, **changes)
    activations = {}
    for context in (1, 4):
        mesh = make_abstract_mesh(MeshSizes(context=context), GPUS["H200"].device)
        activations[context] = memory_of(config, mesh).activations
    # Gathered keys and values are whole, and gradients of weights.
    assert activations[1] / 4 < activations[4] < activations[1] / 2
    stream = io.StringIO()
    sizes = MeshSizes(context=4, tensor=2)
    dry_run(config, sizes, Console(file=stream, width=200))
    text = stream.getvalue()
    assert "data=1 × fsdp=1 × context=4 × tensor=2" in text
    assert describe_context(config, sizes)[0] in text
    assert "context_attention" in text


CHATS = [
    [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "yes" * (n % 3 + 1)}]
    for n in (3, 9, 1, 30, 14, 6, 22, 2) * 4
]
CLI = shlex.split(
    "--model.num-layers 1 --model.vocabulary-size 260 --compute-dtype float32 --log-interval 1"
    " --batch-size 4 --sequence-length 64 --overlap xla --optimizer.warmup-steps 1"
    " --save-interval 2"
)


def logged(log: Path, event: str) -> list[tuple[float, ...]]:
    names = {"step": ("step", "loss", "grad_norm"), "evaluation": ("step", "loss", "tokens")}
    return [tuple(e[n] for n in names[event]) for e in read_log(log) if e["event"] == event]


@pytest.mark.exhaustive
def test_conversations_checkpoints_and_evaluation_on_several_meshes(tmp_path, capsys):
    """A run that resumes on other meshes has the curve of a run on one device."""
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    tokenizer = str(DATA / "llama3" / "tokenizer.json")
    common = [*CLI, "--chat", "--tokenizer", tokenizer, "--data", str(data)]
    common += ["--eval-data", str(data), "--eval-interval", "2", "--optimizer.decay-steps", "4"]
    one, parts = tmp_path / "one.jsonl", tmp_path / "parts.jsonl"
    main([*common, *shlex.split(f"--mesh.data 1 --mesh.tensor 1 --steps 4 --log-file {one}")])
    saved = ["--log-file", str(parts), "--checkpoint-dir", str(tmp_path / "saved")]
    main([*common, *saved, *shlex.split("--mesh.context 2 --mesh.tensor 2 --steps 2")])
    assert "context=2: each sequence of 64 tokens is divided into parts of 32" in (
        capsys.readouterr().out
    )
    again = [*common, *saved, "--resume"]
    main([*again, *shlex.split("--mesh.context 4 --mesh.data 2 --zero 3 --steps 4")])
    for event in ("step", "evaluation"):
        expected = logged(one, event)
        assert len(expected) == (4 if event == "step" else 2)
        np.testing.assert_allclose(logged(parts, event), expected, rtol=1e-4)
