"""Held-out text: the loss is right, on every mesh, and evaluating changes nothing of a run."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.models import reference
from tests.train.initial_weights import first_state
from tests.train.reports import reporter
from train.checkpoint.new_state import init_state
from train.config import presets
from train.config.config import ONE_DEVICE, Config, MeshSizes
from train.data.dataset import TextData, open_dataset
from train.log.log_file import read_log
from train.log.metrics import Evaluation
from train.optimizer.optimizer import make_optimizer
from train.parallel.mesh import make_mesh
from train.parallel.model import ModelFunctions
from train.run.command_line import describe_held_out, main, parse
from train.run.evaluation import Evaluator
from train.run.setup import prepare

RUN = shlex.split(
    "--model.num-layers 1 --mesh.data 2 --mesh.tensor 2 --batch-size 4 --sequence-length 16"
    " --steps 5 --log-interval 1 --overlap xla"
)
TINY = dataclasses.replace(
    presets.debug(),
    model=dataclasses.replace(presets.debug().model, num_layers=1),
    batch_size=4,
    sequence_length=16,
    compute_dtype="float32",
    overlap="xla",
)
SENTENCES = [f"Sentence {number} is held out.\n" for number in range(9)]


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    """216 tokens and the end of the document: 13 sequences, which are no whole number of batches,
    and 8 targets that are left out."""
    path = tmp_path / "held_out.txt"
    path.write_text("".join(SENTENCES))
    return str(path)


def evaluated(log: Path) -> dict[int, dict[str, Any]]:
    return {e["step"]: e for e in read_log(log) if e["event"] == "evaluation"}


def curve(log: Path) -> list[tuple[int, float, float]]:
    return [(e["step"], e["loss"], e["grad_norm"]) for e in read_log(log) if e["event"] == "step"]


def test_evaluating_changes_no_bit_of_a_run(capsys, tmp_path, held_out):
    without, with_it = tmp_path / "without.jsonl", tmp_path / "with.jsonl"
    main([*RUN, "--log-file", str(without)])
    assert "held-out" not in capsys.readouterr().out
    main([*RUN, "--log-file", str(with_it), "--eval-data", held_out, "--eval-interval", "2"])
    assert curve(with_it) == curve(without)

    output = capsys.readouterr().out
    assert re.search(r"held-out text: .*held_out.txt, 208 of 217 tokens, every 2 steps", output)
    evaluations = evaluated(with_it)
    assert list(evaluations) == [2, 4, 5], "every second step and the last"
    for step, evaluation in evaluations.items():
        assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
        assert evaluation["tokens"] == 208
        shown = f"held-out loss {evaluation['loss']:.4f}, perplexity {evaluation['perplexity']:.4g}"
        assert re.search(rf"^ +{step}  {re.escape(shown)}, 208 tokens in ", output, re.MULTILINE)
    start = next(e for e in read_log(with_it) if e["event"] == "start")
    assert start["configuration"]["eval_text"]["token_count"] == 217


@pytest.mark.exhaustive
def test_a_resumed_run_evaluates_as_the_uninterrupted_one(capsys, tmp_path, held_out):
    whole, halves = tmp_path / "whole.jsonl", tmp_path / "halves.jsonl"
    evaluation = ["--eval-data", held_out, "--eval-interval", "2", "--save-interval", "3"]
    main([*RUN, *evaluation, "--log-file", str(whole)])
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--log-file", str(halves)]
    main([*RUN, *evaluation, *saved])
    (tmp_path / "saved" / "step_5").rename(tmp_path / "later")
    main([*RUN, *evaluation, *saved, "--resume", "--eval-interval", "1"])
    assert "changed since" not in capsys.readouterr().out
    losses = {step: evaluation["loss"] for step, evaluation in evaluated(halves).items()}
    assert list(losses) == [2, 4, 5]
    assert losses == {step: evaluation["loss"] for step, evaluation in evaluated(whole).items()}


@cache
def text(path: str | None = None, separate_documents: bool = False) -> TextData:
    return open_dataset(
        path,
        None,
        sequence_length=TINY.sequence_length,
        batch_size=TINY.batch_size,
        seed=0,
        separate_documents=separate_documents,
    )


def evaluate(
    held_out: str, sizes: MeshSizes, separate_documents: bool = False, **changes: Any
) -> Evaluation:
    """Evaluates the initial parameters."""
    config = dataclasses.replace(TINY, **changes)
    mesh, model = make_mesh(sizes), ModelFunctions(config, sizes)
    optimizer = make_optimizer(config.optimizer, config.steps, model.specs)
    state = first_state(config, model, optimizer, mesh)
    data = text(held_out, separate_documents)
    evaluation = Evaluator(config, model, mesh, data)(state["params"])
    assert evaluation is not None
    return evaluation


def reference_loss(held_out: str, config: Config, sequences: int) -> float:
    batch = text(held_out).sequences(range(sequences))

    @jax.jit
    def losses_of(inputs: Any, targets: Any) -> Any:
        return reference.loss(config.model, ModelFunctions(config).init(), inputs, targets)

    losses = losses_of(batch["inputs"], batch["targets"])
    assert losses.shape == (sequences, config.sequence_length)
    return float(np.mean(np.asarray(losses, np.float64)))


@pytest.mark.parametrize(
    ("sizes", "changes", "sequences"),
    [
        ((2, 2, 2), {"overlap": "ring", "zero": 3}, 13),
        ((1, 1, 4), {"eval_batches": 2, "overlap": "rewrite"}, 8),
        pytest.param((1, 1, 1), {}, 13, marks=pytest.mark.exhaustive),
        pytest.param((2, 2, 2), {"zero": 2}, 13, marks=pytest.mark.exhaustive),
        # Each data group has one sequence at a time.
        pytest.param(
            (2, 1, 2), {"gradient_accumulation_steps": 2}, 13, marks=pytest.mark.exhaustive
        ),
        pytest.param((1, 1, 1), {"eval_batches": 100}, 13, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_loss_is_the_mean_over_the_text(held_out, sizes, changes, sequences):
    evaluation = evaluate(held_out, MeshSizes(*sizes), **changes)
    assert evaluation.tokens == 16 * sequences
    # float32 on another mesh: sums differ in their order.
    assert evaluation.loss == pytest.approx(reference_loss(held_out, TINY, sequences), rel=1e-5)


@pytest.mark.exhaustive
def test_documents_are_kept_apart_as_in_training(tmp_path):
    """Each document evaluated by itself has the same losses."""
    documents = ["abcdefg hijklmn", "opqrstu vwxyz 0123456789 abcde", "short"]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    apart = evaluate(str(path), ONE_DEVICE, separate_documents=True)
    together = evaluate(str(path), ONE_DEVICE)
    assert apart.tokens == together.tokens
    assert apart.loss != pytest.approx(together.loss, rel=1e-6)


def test_the_same_parameters_evaluate_to_the_same_bits(held_out):
    mesh, model = make_mesh(ONE_DEVICE), ModelFunctions(TINY)
    params = init_state(model, make_optimizer(TINY.optimizer, 5, model.specs), mesh)["params"]
    evaluator = Evaluator(TINY, model, mesh, text(held_out))
    before = jax.device_get(params)
    first, second = evaluator(params), evaluator(params)
    assert first is not None
    assert second is not None
    assert first.loss == second.loss
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), before)
    # It stops when it is asked to.
    asked = iter([False, True])
    assert evaluator(params, lambda: next(asked)) is None
    output = io.StringIO()
    with reporter(output=output) as reports:
        reports.evaluated(7, None)
    assert output.getvalue() == "      7  held-out text is left out\n"


def test_text_that_is_trained_on_is_not_held_out(held_out):
    setup = prepare(parse([*RUN, "--data", held_out, "--eval-data", held_out]))
    described = describe_held_out(setup)
    assert described[1:] == ["warning: the held-out text is the text that is trained on"]
    assert len(describe_held_out(prepare(parse([*RUN, "--eval-data", held_out])))) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--eval-data none.txt", "eval_data: data='none.txt': no file matches"),
        ("--eval-data {short}", "eval_data: sequence_length=16: one sequence needs 17 tokens"),
        ("--eval-interval 0", "eval_interval=0: expected at least 1"),
        ("--eval-batches 0", "eval_batches=0: expected at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(capsys, tmp_path, arguments, sentence):
    (tmp_path / "short").write_text("too short")
    with pytest.raises(SystemExit) as stopped:
        main([*RUN, *shlex.split(arguments.format(short=tmp_path / "short"))])
    assert stopped.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
