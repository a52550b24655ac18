"""A run that begins with a Hugging Face folder, and what can be done with its checkpoints."""

from __future__ import annotations

import json
import shlex
import shutil

import numpy as np
import pytest

from models.command_line import main as models_main
from models.config import debug
from models.hugging_face import ModelFolder
from tests.models.hugging_face.folders import DATA
from tests.models.hugging_face.tiny_folders import FOLDERS
from tests.train.config.test_defaults import saved_run
from train.config.config import Config
from train.config.model_folder import with_model_of
from train.config.presets import PRESETS
from train.log.log_file import read_log
from train.run.command_line import main, parse

RUN = shlex.split(
    "--overlap xla --batch-size 4 --sequence-length 16 --log-interval 1 --compute-dtype float32"
    " --optimizer.warmup-steps 1"
)


def losses(log) -> list[float]:
    return [event["loss"] for event in read_log(str(log)) if event["event"] == "step"]


def test_every_mesh_and_layout_begins_with_the_same_weights(tmp_path):
    """The first loss of a run is that of the weights it was given."""
    first = []
    for number, flags in enumerate(
        (
            "--mesh.tensor 1 --mesh.data 1",
            "--mesh.tensor 4 --mesh.fsdp 2 --zero 3",
            "--mesh.tensor 2 --mesh.data 1 --scan-layers 1",
        )
    ):
        log = tmp_path / f"{number}.jsonl"
        given = ["--init-from", str(DATA / "qwen2"), "--steps", "1", "--log-file", str(log)]
        main([*RUN, *flags.split(), *given])
        first += losses(log)
    np.testing.assert_allclose(first, first[0], rtol=1e-5)


def test_a_fine_tuned_model_is_exported_and_a_run_is_resumed(capsys, tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path / "saved"), "--mesh.tensor", "2", "--mesh.data", "1"]
    main([*RUN, "--init-from", str(DATA / "mistral"), "--steps", "2", *saved])
    # Neither the model nor the tokenizer has to be named again.
    log = tmp_path / "resumed.jsonl"
    main([*RUN, "--steps", "3", "--resume", "--log-file", str(log), *saved])
    assert len(losses(log)) == 1
    # Nor where variants of the resumed run are compared, as it proposes.
    command = capsys.readouterr().out.rpartition("to compare: ")[2].partition(" --a ")[0]
    proposed = with_model_of(parse(shlex.split(command)[3:]))
    assert proposed.model == ModelFolder.config_of(DATA / "mistral")
    assert (proposed.steps, proposed.resume, proposed.checkpoint_dir) == (3, False, None)
    models_main(["export", str(tmp_path / "saved"), str(tmp_path / "out")])
    original, trained = ModelFolder(DATA / "mistral"), ModelFolder(tmp_path / "out")
    assert trained.config == original.config
    assert trained.dtypes == original.dtypes
    name, whole = "model.layers.0.mlp.up_proj.weight", [slice(None)] * 2
    assert not np.array_equal(trained.read(name, whole), original.read(name, whole))
    assert trained.stop_tokens == original.stop_tokens == (257, 259)


@pytest.mark.parametrize("known", [None, 256])
def test_an_export_has_the_length_that_its_run_was_trained_with(known, tmp_path):
    """Unless the model has a context. Fine-tuning takes the length from there."""
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    flags = [
        *RUN,
        "--steps",
        "1",
        "--mesh.tensor",
        "1",
        "--mesh.data",
        "1",
        "--checkpoint-dir",
        run,
    ]
    main([*flags, "--model.num-layers", "1", "--model.context-length", str(known)])
    models_main(["export", run, out])
    context = known or 16
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == (
        context
    )
    assert parse(["--init-from", out]).sequence_length == context


def test_a_folder_that_says_nothing_of_its_context_is_exported_as_it_came(tmp_path):
    """A run with short sequences does not say how long those were that it was trained with."""
    folder, out = shutil.copytree(DATA / "mistral", tmp_path / "in"), tmp_path / "out"
    values = json.loads((folder / "config.json").read_text())
    del values["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(values))
    run = ["--checkpoint-dir", str(tmp_path / "run"), "--mesh.tensor", "1", "--mesh.data", "1"]
    main([*RUN, "--init-from", str(folder), "--steps", "1", *run])
    models_main(["export", str(tmp_path / "run"), str(out)])
    assert "max_position_embeddings" not in json.loads((out / "config.json").read_text())


@pytest.mark.exhaustive
def test_a_model_with_experts_is_fine_tuned_alike_on_meshes_and_exported(tmp_path):
    of_meshes = []
    for number, flags in enumerate(
        ("--mesh.tensor 2 --mesh.fsdp 2 --zero 3", "--mesh.tensor 1 --mesh.data 2 --scan-layers 1")
    ):
        log, saved = tmp_path / f"{number}.jsonl", str(tmp_path / f"saved{number}")
        given = ["--init-from", str(DATA / "mixtral"), "--steps", "3", "--log-file", str(log)]
        main([*RUN, *flags.split(), *given, "--checkpoint-dir", saved])
        of_meshes.append(losses(log))
    np.testing.assert_allclose(of_meshes[1], of_meshes[0], rtol=1e-4)
    models_main(["export", str(tmp_path / "saved0"), str(tmp_path / "out")])
    original, trained = ModelFolder(DATA / "mixtral"), ModelFolder(tmp_path / "out")
    assert trained.config == original.config
    name, whole = "model.layers.1.block_sparse_moe.experts.3.w2.weight", [slice(None)] * 2
    assert not np.array_equal(trained.read(name, whole), original.read(name, whole))


def test_a_run_has_the_head_that_is_stored_beside_a_tied_embedding(tmp_path):
    FOLDERS["tied, head differs"](tmp_path)
    config = with_model_of(Config(debug(), init_from=str(tmp_path)))
    assert not config.model.tied_head
    FOLDERS["tied, no head"](tmp_path)
    assert with_model_of(Config(debug(), init_from=str(tmp_path))).model.tied_head


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model.num-layers", "4"], "its model is another one: model.num_layers=4, not 2; leave"),
        (["--tokenizer", "missing.json"], "tokenizer='missing.json'"),
        (["--mesh.tensor", "8"], "num_heads=4 is not divisible by a tensor axis of 8 devices"),
    ],
)
def test_what_does_not_fit_the_folder_is_refused(capsys, flags, sentence):
    with pytest.raises(SystemExit):
        main([*RUN, "--init-from", str(DATA / "qwen3"), *flags])
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("mode", ["", "--resume", "--eval-only --eval-data DATA"])
def test_a_flag_of_the_model_counts_whatever_its_value(mode, tmp_path):
    """Also the value that the preset has, 2 layers, where the folder has 3."""
    values = json.loads((DATA / "qwen3" / "config.json").read_text())
    values |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    run = tmp_path / "run"
    (run / "hugging_face").mkdir(parents=True)
    (run / "hugging_face" / "config.json").write_text(json.dumps(values))
    saved_run(run, PRESETS["debug"]())
    place = f"--checkpoint-dir {run} {mode}" if mode else f"--init-from {run}"
    given = shlex.split(place)
    assert parse([*given, "--model.num-layers", "3"]).model == parse(given).model
    with pytest.raises(ValueError, match=r"another one: model\.num_layers=2, not 3; leave"):
        parse([*given, "--model.num-layers", "2"])


def test_a_damaged_folder_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main([*RUN, "--init-from", str(tmp_path)])
    error = " ".join(capsys.readouterr().err.split())
    assert f"init_from='{tmp_path}'" in error and "model_type=None is not known" in error


def test_a_folder_without_weights_is_refused_with_the_way_to_train_its_model(capsys, tmp_path):
    shutil.copy(DATA / "qwen3" / "config.json", tmp_path)
    run = [*RUN, "--mesh.tensor", "1", "--mesh.data", "1", "--steps", "1"]
    with pytest.raises(SystemExit):
        main([*run, "--init-from", str(tmp_path)])
    error = " ".join(capsys.readouterr().err.split())
    assert "has neither model.safetensors nor" in error and "download the weights" in error
    way = shlex.join(["--config", str(tmp_path / "config.json")])
    assert f"random weights, give {way} in place of --init-from" in error
    main([*run, *shlex.split(way)])
    output = capsys.readouterr().out
    assert output.startswith(f"{tmp_path.name}: ") and "done: 1 step, " in output
