"""The plan: what it chooses for known machines, what it keeps, and what it prints."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collective_matmul.ops.attention import flash_attention
from tests.train.plan.plans import EIGHT, H100, H200, ROOT, config, plan_of
from train.config import model_folder
from train.config.checks import check
from train.config.config import MeshConfig, MeshSizes
from train.memory.device_memory import GPUS
from train.parallel.mesh import mesh_sizes
from train.plan.candidates import Machine, make_plan
from train.plan.mesh_choice import SAVED_SIZES, describe_faster_mesh, planned_mesh_sizes
from train.run import command_line
from train.run.command_line import main, parse


@pytest.mark.parametrize(
    "preset",
    [
        "llama3-70b",
        "qwen3-32b",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("llama3-8b", "llama3-405b")
        ),
    ],
)
def test_plans_of_known_machines(preset: str) -> None:
    for devices in (2, 8, 64, 512):
        plan = plan_of(preset, devices)
        times = [candidate.seconds for candidate in plan.candidates]
        assert times == sorted(times)
        meshes = [candidate.sizes for candidate in plan.candidates]
        assert len(meshes) == len(set(meshes))
        for candidate in plan.candidates:
            assert candidate.sizes.devices == devices
            assert candidate.config.fp8 is None
            assert 0.1 < candidate.prediction.mfu < 0.7
            assert candidate.memory.total < 80e9
            check(candidate.config, candidate.sizes)
            beyond_a_node = "between nodes" in candidate.prediction.extrapolated
            assert beyond_a_node == (devices > 8)
        assert sum(plan.refused.values()) > 0


def test_8_gpus_of_8b_prefer_shards_of_weights_to_a_long_tensor_axis() -> None:
    plan = plan_of("llama3-8b", 8)
    times = {candidate.sizes: candidate.seconds for candidate in plan.candidates}
    assert plan.candidates[0].sizes.tensor <= 2
    assert times[MeshSizes(fsdp=4, tensor=2)] < times[MeshSizes(fsdp=2, tensor=4)]
    assert times[MeshSizes(fsdp=4, tensor=2)] < times.get(MeshSizes(tensor=8), 1e9)


def test_what_cannot_fit_says_why() -> None:
    for devices in (2, 8, 64):
        plan = plan_of("llama3-405b", devices)
        assert not plan.candidates
        assert plan.refused.most_common(1)[0][0] == "state does not fit"
        # The nearest to fitting: sharded over all devices that may share it.
        [least] = re.findall(
            r"take ([\d,.]+) GB, and 69.0 GB may be used", plan.nearest("state does not fit")
        )
        assert float(least.replace(",", "")) == pytest.approx(4870 / devices, rel=1e-3)


@pytest.mark.parametrize(
    "model",
    [
        "llama3-8b --model.num-layers 15 --devices 1 --batch-size 2",
        "qwen3-32b --devices 8 --sequence-length 12288 --scan-layers 1",
    ],
)
def test_where_nothing_fits_it_says_what_would(model: str, capsys) -> None:
    plan = shlex.split(f"--plan --device H100 --preset {model}")
    with pytest.raises(SystemExit, match=r"^1$"):
        main(plan)
    advice = capsys.readouterr().out.splitlines()[-1]
    before, _, ways = advice.partition("; each of these would: ")
    assert before == "nothing fits"
    flags = [way.partition(",")[0] for way in ways.split("; ")]
    assert {"--optimizer.kind muon", "--device H200", "--lora.rank 16"} <= set(flags)
    for each in flags:
        main([*plan, *each.split()])
    assert "nothing fits" not in capsys.readouterr().out
    # Of numbers, the nearest that fits.
    [batch] = re.findall(r"--batch-size (\d+)", ways)
    with pytest.raises(SystemExit, match=r"^1$"):
        main([*plan, "--batch-size", str(2 * int(batch))])


def test_no_advice_makes_the_largest_model_fit_on_a_gpu(capsys) -> None:
    plan = shlex.split("--plan --device H200 --devices 1 --preset llama3-405b")
    with pytest.raises(SystemExit, match=r"^1$"):
        main(plan)
    last = capsys.readouterr().out.splitlines()[-1]
    before, _, advice = last.rpartition(": ")
    assert advice == "use a smaller model, or more and larger GPUs"
    # It says how far it looked.
    assert before.startswith("nothing fits, nor with --optimizer.kind muon, which has fewer")
    assert "; --sequence-length 1024; --lora.rank 16 --lora.base-format rowwise, " in before
    assert before.endswith("; --devices 32")


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--zero 0", "zero", 0),
        ("--remat none", "remat", "none"),
        ("--scan-layers=0", "scan_layers", 0),
        ("--gradient_accumulation_steps 1", "gradient_accumulation_steps", 1),
        ("--batch-size 8", "batch_size", 8),
        ("--mesh.context 1 --sequence-length 65536", "sequence_length", 65536),
    ],
)
def test_a_flag_is_kept_where_its_value_is_the_preset_s(flag: str, name: str, value: Any) -> None:
    """The plan of four layers for 16 GPUs would choose each of these itself, and does so without
    the flag."""
    preset = "--preset llama3-8b --model.num-layers 4"
    machine = Machine(16, H100, GPUS["H100"].memory)

    def found(flags: str) -> set[Any]:
        fitting = make_plan(parse(shlex.split(f"{preset} {flags}")), machine).fitting
        if "mesh" in flag:
            return {each.sizes.context for each in fitting}
        return {getattr(each.config, name) for each in fitting}

    kept = 1 if "mesh" in flag else value
    assert found(flag) == {kept}
    assert found(flag.partition("--mesh.context 1")[2]) != {kept}


def test_a_level_that_follows_from_the_mesh_is_the_plan_s_to_choose(tmp_path: Path) -> None:
    """A row's mesh, added to its plan, leaves the level of the row possible."""

    def levels(flags: str) -> set[int]:
        asked = parse(shlex.split(f"--preset llama3-8b --model.num-layers 4 {flags}"))
        return {each.config.zero for each in make_plan(asked, Machine(8, H100, 10**12)).fitting}

    assert levels("--mesh.fsdp 8") == {1, 2, 3}
    for level in range(4):
        assert levels(f"--mesh.fsdp 8 --zero {level}") == {level}
    # A file as --print-config writes it has the values of a preset too.
    file = tmp_path / "run.json"
    for values, expected in (({"zero": None}, {1, 2, 3}), ({"zero": 2}, {2})):
        file.write_text(json.dumps({"preset": "llama3-8b", "remat": "none", **values}))
        asked = parse(["--config", str(file), "--mesh.fsdp", "8", "--model.num-layers", "4"])
        fitting = make_plan(asked, Machine(8, H100, 10**12)).fitting
        assert {each.config.zero for each in fitting} == expected
        assert len({each.config.remat for each in fitting}) > 1


def test_a_plan_without_8_bits_has_no_rows_in_8_bits(capsys) -> None:
    plan = shlex.split("--plan --preset llama3-8b --model.num-layers 4 --device H100 --devices 2")
    main([*plan, "--fp8", "None"])
    assert "tensorwise" not in capsys.readouterr().out
    main(plan)
    assert "tensorwise" in capsys.readouterr().out


def test_where_a_flag_is_in_the_way_a_plan_says_so(capsys) -> None:
    plan = shlex.split("--plan --preset llama3-8b --device H100 --devices 8 --mesh.tensor 1")
    with pytest.raises(SystemExit, match=r"^1$"):
        main([*plan, "--zero", "0"])
    assert "nothing fits; each of these would: --zero left out; " in capsys.readouterr().out
    main(plan)
    assert "nothing fits" not in capsys.readouterr().out


def test_several_flags_are_kept_together() -> None:
    plan = plan_of("llama3-8b", 8, zero=3, remat="full", batch_size=16)
    assert plan.candidates
    for candidate in plan.candidates:
        kept = candidate.config
        assert (kept.zero, kept.remat, kept.batch_size) == (3, "full", 16)
    tensor_8 = dataclasses.replace(config().mesh, tensor=8)
    assert {c.sizes for c in plan_of("llama3-8b", 8, mesh=tensor_8).candidates} <= {
        MeshSizes(tensor=8)
    }


def test_the_largest_plan_takes_seconds() -> None:
    started = time.perf_counter()
    plan_of("llama3-405b", 512)
    assert time.perf_counter() - started < 60


def test_the_command_of_the_best_can_be_run(capsys) -> None:
    arguments = ["--preset", "llama3-8b", "--model.num-layers", "4", "--data", "text/*"]
    main(["--plan", *arguments, "--device", "H100", "--devices", "4", "--mesh.data", "0"])
    output = capsys.readouterr().out
    [command] = re.findall("^to run the first: python -m train (.*)$", output, re.MULTILINE)
    best = plan_of("llama3-8b", 4, layers=4).candidates[0]
    again = parse(shlex.split(command))
    assert again.data == "text/*"
    assert again == dataclasses.replace(best.config, data="text/*")
    assert again.mesh == MeshConfig(*best.sizes)
    rows = re.findall("^data=.*$", output, re.MULTILINE)
    assert str(best.sizes) in rows[0]
    assert f"{best.prediction.mfu:.1%}" in rows[0]
    assert sum("tensorwise" in row or "rowwise" in row for row in rows) == 3


@pytest.mark.parametrize(("devices", "nodes"), [(8, None), (12, 2), (32, 4)])
def test_a_plan_for_several_nodes_says_how_they_are_started(devices, nodes, capsys) -> None:
    model = shlex.split("--preset llama3-8b --model.num-layers 4 --batch-size 96")
    main(["--plan", *model, "--device", "H100", "--devices", str(devices)])
    output = capsys.readouterr().out
    assert ("srun" in output) == (nodes is not None)
    if nodes is not None:
        command = f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node 8"
        assert f"{devices} GPUs are {nodes} nodes of 8, each of which runs" in output
        assert command in output
        # As the page has it, for another number of nodes.
        page = (ROOT / "docs/how_to/several_nodes.md").read_text(encoding="utf-8")
        assert command.replace(f"--nodes {nodes}", "--nodes 16") in page


def test_its_commands_run_the_first_and_check_it_here(capsys) -> None:
    main(["--plan", *EIGHT, "--attention", "cudnn", "--plan-network", "40"])
    output = capsys.readouterr().out
    commands = dict(re.findall("^to (.*?): python -m train (.*)$", output, re.MULTILINE))
    first, in_8_bits, checked = (parse(shlex.split(commands[name])) for name in commands)
    assert [*commands] == [
        "run the first",
        "run the first in 8 bits",
        "check the first without GPUs",
    ]
    assert (first.fp8, in_8_bits.fp8) == (None, "tensorwise")
    assert checked == dataclasses.replace(first, dry_run=True, device="H100", plan_network=40.0)
    main(shlex.split(commands["check the first without GPUs"]))
    assert f"that JAX may use of {H100}" in capsys.readouterr().out
    [mesh] = re.findall(
        "another row, add its mesh to this plan; the second's: (.*)$", output, re.MULTILINE
    )
    main(["--plan", *EIGHT, *shlex.split(mesh)])
    again = capsys.readouterr().out
    rows, of_mesh = (re.findall("^data=.*$", text, re.MULTILINE) for text in (output, again))
    assert rows[1].split() == of_mesh[0].split()


@pytest.mark.parametrize("missing", ["it needs the package", None])
def test_it_says_what_attention_needs_on_the_gpus(missing, monkeypatch, capsys) -> None:
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: missing)
    main(["--plan", *EIGHT, "--attention", "flash3"])
    asked = capsys.readouterr().out
    assert "attention by flash3" in asked
    needs = "flash3 is planned for another machine, which needs it; here it needs the package"
    assert (needs in asked) == (missing is not None)
    main(["--plan", *EIGHT])
    chosen = capsys.readouterr().out
    assert f"attention by {'flash3' if missing is None else 'cudnn'}" in chosen
    assert ("add --attention flash3 to plan for" in chosen) == (missing is not None)


def test_a_dry_run_has_as_many_devices_as_its_mesh(capsys) -> None:
    """More than this machine: those of the axis of sequences too."""
    tiny = shlex.split("--model.num-layers 1 --sequence-length 256 --batch-size 16 --device H100")
    main(["--dry-run", *tiny, "--mesh.data", "16", "--mesh.tensor", "1", "--mesh.context", "2"])
    assert "on data=16 × fsdp=1 × context=2 × tensor=1" in capsys.readouterr().out


def test_a_plan_needs_to_know_its_machine(capsys) -> None:
    for arguments, sentence in (
        ([], "add --devices"),
        (["--devices", "0"], "devices=0"),
        (["--devices", "2", "--plan-network", "0"], "plan_network=0"),
        (["--devices", "2", "--freeze", "nothing.*"], "freeze='nothing.*': matches no parameter"),
        (["--devices", "2", "--freeze", "*"], "freeze='*': matches all parameters"),
    ):
        with pytest.raises(SystemExit):
            main(["--plan", "--preset", "llama3-8b", "--device", "H100", *arguments])
        assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--plan", "--preset", "llama3-8b"])
    assert "add --devices, and --device if they are not H200" in capsys.readouterr().err


def test_a_tensor_axis_of_0_takes_the_fastest_size_that_fits() -> None:
    run = config(zero=3)
    assert planned_mesh_sizes(run, 8, 8, H100) == MeshSizes(fsdp=8)
    assert planned_mesh_sizes(run, 8, 8, "cpu") == mesh_sizes(run, 8, 8) == MeshSizes(tensor=8)
    # Fewer sequences than devices: the batch does not divide a longer fsdp axis.
    four = dataclasses.replace(run, batch_size=4)
    assert planned_mesh_sizes(four, 8, 8, H100) == MeshSizes(fsdp=4, tensor=2)
    # What replicates its state fits with fewer replicas alone.
    assert planned_mesh_sizes(config(), 8, 8, H100) == MeshSizes(data=2, tensor=4)
    asked = dataclasses.replace(run, mesh=MeshConfig(tensor=4))
    assert planned_mesh_sizes(asked, 8, 8, H100) == MeshSizes(fsdp=2, tensor=4)
    assert planned_mesh_sizes(config("llama3-405b"), 8, 8, H100) == MeshSizes(tensor=8)


def test_a_dry_run_names_a_faster_mesh() -> None:
    replicated, sharded = MeshSizes(data=2, tensor=4), MeshSizes(fsdp=8)
    (line,) = describe_faster_mesh(config(), replicated, H100, "cudnn")
    best = plan_of("llama3-8b", 8).candidates[0]
    assert line.startswith("faster: --mesh.data 1 --mesh.fsdp 8 --mesh.tensor 1 --mesh.context 1")
    assert f"--zero 3 takes {1e3 * best.seconds:.0f} ms" in line
    # What was asked for is kept, and nothing is said where little would be gained.
    (kept,) = describe_faster_mesh(config(zero=1), MeshSizes(tensor=8), H100, "cudnn")
    assert "--zero" not in kept
    assert describe_faster_mesh(config(zero=3), sharded, H100, "cudnn") == []
    assert describe_faster_mesh(config(), replicated, "cpu", "cudnn") == []


def test_a_resumed_run_keeps_its_mesh(monkeypatch) -> None:
    saved = {SAVED_SIZES: MeshSizes(fsdp=2, tensor=4)._asdict()}

    def found(path: str) -> SimpleNamespace:
        assert path == "run"
        return SimpleNamespace(configuration=lambda: saved)

    monkeypatch.setattr(model_folder, "find_checkpoint", found)
    run = config(zero=3, checkpoint_dir="run", resume=True)
    assert planned_mesh_sizes(run, 8, 8, H100) == MeshSizes(fsdp=2, tensor=4)
    # Other numbers of devices, a run that begins, and flags have a mesh of their own.
    assert planned_mesh_sizes(run, 4, 4, H200) != MeshSizes(fsdp=2, tensor=4)
    begins = dataclasses.replace(run, resume=False)
    assert planned_mesh_sizes(begins, 8, 8, H100) == MeshSizes(fsdp=8)
    asked = dataclasses.replace(run, mesh=MeshConfig(tensor=2))
    assert planned_mesh_sizes(asked, 8, 8, H100) == MeshSizes(fsdp=4, tensor=2)
    for kind in (H100, "cpu"):
        assert planned_mesh_sizes(run, 8, 8, kind) == MeshSizes(fsdp=2, tensor=4)
        others = dataclasses.replace(run, mesh=MeshConfig(fsdp=4))
        assert planned_mesh_sizes(others, 8, 8, kind).fsdp == 4


def test_a_dry_run_says_where_a_run_here_takes_another_mesh(monkeypatch, capsys) -> None:
    """A dry run predicts for GPUs, and on simulated devices a run predicts nothing."""
    short = shlex.split("--preset debug --model.num-layers 1 --sequence-length 16")
    sentence = (
        "this mesh is chosen for NVIDIA H200; a run on the 8 cpu devices here would take data=1 ×"
        " fsdp=1 × tensor=8, since no step time is predicted there"
    )
    for flags, is_printed in (("", True), ("--mesh.tensor 2", False), ("--mesh.data 16", False)):
        main([*short, "--dry-run", *flags.split()])
        assert (sentence in capsys.readouterr().out) == is_printed
    monkeypatch.setattr(command_line, "train", lambda setup, *_, **__: [])
    monkeypatch.setattr(command_line, "conclude", lambda *_: None)
    line = (
        "\ntensor=8: as many devices as divide the model, since no step time is predicted for cpu"
    )
    for flags, is_printed in (("", True), ("--mesh.tensor 2", False)):
        main([*short, *flags.split()])
        assert (line in capsys.readouterr().out) == is_printed


@pytest.mark.parametrize(
    ("devices", "flags", "sentence"),
    [
        (8, "--mesh.tensor 3", "num_heads=32 is not divisible by a tensor axis of 3 devices;"),
        (6, "--mesh.tensor 3", "num_heads=32 is not divisible by a tensor axis of 3 devices;"),
        (8, "--mesh.tensor 16", "mesh.data=1 × mesh.fsdp=1 × mesh.tensor=16 needs 16 devices and"),
        (16, "--mesh.tensor 16", "mesh.tensor=16: expected a divisor of the 8 GPUs of a node"),
        (8, "--mesh.data 3 --mesh.tensor 2", "mesh.tensor=2 has 6 of 8 devices; expected a mesh"),
        (8, "--mesh.data -1", "mesh.data=-1: expected a number of devices, or 0 for what fits;"),
        (8, "--mesh.fsdp 8 --batch-size 6", "batch_size=6 is not divisible by mesh.data=1 ×"),
        (8, "--zero 3 --mesh.tensor 8", "zero=3: nothing is sharded, as mesh.fsdp=1; give --mesh."),
        (
            8,
            "--zero 1 --mesh.fsdp 1",
            "zero=1: nothing is sharded, as mesh.fsdp=1; give --mesh.",
        ),
        (8, "--overlap nosuch", "overlap='nosuch': expected auto, rewrite, rewrite-jit, or one"),
    ],
)
def test_what_fits_no_mesh_is_refused_as_by_a_run(devices, flags, sentence, capsys) -> None:
    """By an error alone: more memory would not help."""
    model = shlex.split(f"--preset llama3-8b --device H100 --devices {devices}")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--plan", *model, *flags.split()])
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and sentence in output.err
    assert output.out == ""


def test_a_plan_asks_for_a_model(capsys) -> None:
    machine = ["--plan", "--device", "H100", "--devices", "2"]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(machine)
    error = capsys.readouterr().err
    assert "plan: expected a model; add --preset" in error and "--init-from" in error
    main([*machine, "--preset", "debug"])
    assert "plan: debug on 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "sentence"), [(2, "1 other mesh is predicted"), (8, "meshes are predicted")]
)
def test_it_says_what_is_as_fast_as_the_first(devices: int, sentence: str, capsys) -> None:
    main(["--plan", "--preset", "llama3-8b", "--device", "H200", "--devices", str(devices)])
    assert f"{sentence} to take less than 5% longer than the first row" in capsys.readouterr().out
