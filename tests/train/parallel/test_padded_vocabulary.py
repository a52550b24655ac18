"""A vocabulary that the tensor axis does not divide is padded, and stays so on other meshes."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from train.log.log_file import read_log
from train.run.command_line import main

MODEL = shlex.split(
    "--model.num-layers 1 --model.vocabulary-size 258 --log-interval 1 --overlap xla --mesh.data 1"
    " --batch-size 2 --sequence-length 16 --compute-dtype float32"
)

#: What a tensor axis of 4 devices needs.
PADDED = ("--model.padded-vocabulary-size", "384")


def run(directory: Path, name: str, *arguments: str) -> list[float]:
    log = directory / f"{name}.jsonl"
    main([*MODEL, "--log-file", str(log), *arguments])
    return [record["loss"] for record in read_log(str(log)) if record["event"] == "step"]


@pytest.mark.parametrize(
    "tensor_axes", ["4 1", pytest.param("4 8 1", marks=pytest.mark.exhaustive)]
)
def test_a_padded_model_trains_and_resumes_on_any_mesh(tmp_path, tensor_axes):
    first, *others = tensor_axes.split()
    steps = str(2 * (1 + len(others)))
    (tmp_path / "text.txt").write_text("Plain text, as every letter is a token. " * 40)
    data = ["--data", str(tmp_path / "text.txt")]
    expected = run(tmp_path, "one", *data, "--mesh.tensor", "1", "--steps", steps, *PADDED)
    saved = ["--checkpoint-dir", str(tmp_path / "saved")]
    curve = run(tmp_path, first, *data, *saved, "--mesh.tensor", first, "--steps", "2")
    for number, tensor in enumerate(others, 2):
        resumed = [*data, *saved, "--resume", "--mesh.tensor", tensor, "--steps", str(2 * number)]
        curve += run(tmp_path, tensor, *resumed)
    # The order of sums differs between meshes.
    np.testing.assert_allclose(curve, expected, rtol=2e-5)
