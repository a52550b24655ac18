"""Experts in MXFP4 are read as Hugging Face's library dequantizes them, in any part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from models.command_line import main
from models.generation import Generator
from models.generation.generator import make_mesh
from models.hugging_face import ModelFolder, load

DATA = Path(__file__).parents[2] / "data" / "hugging_face_mxfp4"
EXPECTED = np.load(DATA / "expected.npz")
PACKED = [name for name in EXPECTED if name.endswith("_proj")]


@pytest.mark.parametrize("name", PACKED)
def test_parts_are_those_of_the_dequantized_tensor(name):
    folder, expected = ModelFolder(DATA / "model"), EXPECTED[name]
    experts, rows, columns = expected.shape
    for index in (
        [slice(None)] * 3,
        [slice(0, experts), slice(0, rows), slice(0, columns)],
        [slice(1, 3), slice(5, rows - 3), slice(2, 7)],
        [slice(3, 4), slice(rows - 1, rows), slice(0, 1)],
        [slice(1, 1), slice(0, 0), slice(0, 2)],
    ):
        part = folder.read(name, index)
        assert part.dtype == jnp.bfloat16
        np.testing.assert_array_equal(part.astype(np.float32), expected[tuple(index)])


def test_logits_are_those_of_the_library():
    folder = ModelFolder(DATA / "model")
    made = Generator(folder.config, mesh=make_mesh(2), implementation="xla", dtype="float32")
    params = load(folder, made.abstract_params)
    specs = {name: leaf.sharding.spec for name, leaf in made.abstract_params.items()}
    mapped = jax.shard_map(
        lambda params, tokens: made.model(params)(tokens),
        mesh=made.mesh,
        in_specs=(specs, P()),
        out_specs=P(None, None, "tensor"),
    )
    found: Any = jax.jit(mapped)(params, EXPECTED["tokens"])
    assert np.max(np.abs(found - EXPECTED["logits"])) < 1e-4 * np.max(np.abs(EXPECTED["logits"]))


def test_an_export_has_the_numbers_and_says_that_they_are_not_quantized(tmp_path):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    main(["import", str(DATA / "model"), str(checkpoint)])
    main(["export", str(checkpoint), str(out)])
    written = load_file(out / "model.safetensors")
    assert not [name for name in written if name.endswith(("_blocks", "_scales"))]
    for name in PACKED:
        np.testing.assert_array_equal(written[name].astype(np.float32), EXPECTED[name])
    values = json.loads((out / "config.json").read_text())
    given = json.loads((DATA / "model" / "config.json").read_text())
    assert "quantization_config" not in values
    assert values["rope_parameters"] == given["rope_parameters"]
    assert ModelFolder(out).config == ModelFolder(DATA / "model").config


def test_blocks_without_their_scales_are_refused(tmp_path):
    shutil.copytree(DATA / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = PACKED[0] + "_scales"
    save_file({**tensors, name: tensors[name][..., :1]}, file)
    sentence = (
        r"gate_up_proj: blocks \[4, 64, 2, 16\] and scales \[4, 64, 1\] of U8 and U8: expected"
    )
    with pytest.raises(ValueError, match=sentence):
        ModelFolder(tmp_path / "model")
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing: \S*gate_up_proj; not expected: \S*_blocks"):
        ModelFolder(tmp_path / "model")
