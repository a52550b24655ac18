"""The plan: its table for known machines, and predictions beside what was measured or traced.

Measured steps are those of benchmarks/reports. The rates were fitted to some of them, so these
tests say that the arithmetic is what it was, not how good it is for other configurations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from collective_matmul.jaxprs import scratch
from collective_matmul.ops.attention import flash_attention
from models.parameters.adapters import LoraConfig
from train.config import model_folder
from train.config.checks import check
from train.config.config import Config, MeshConfig, MeshSizes
from train.config.presets import PRESETS
from train.log.metrics import Record, peak_flops
from train.memory.device_memory import GPUS
from train.memory.step_memory import memory_of
from train.parallel.mesh import make_abstract_mesh, mesh_sizes
from train.parallel.model import ModelFunctions
from train.plan.candidates import Machine, Plan, check_sharded, make_plan
from train.plan.memory_estimate import predict_memory
from train.plan.mesh_choice import SAVED_SIZES, describe_faster_mesh, planned_mesh_sizes
from train.plan.rates import RATES
from train.plan.run import describe_step_time, predict_run
from train.plan.step_time import StepTime, predict
from train.plan.traced_rows import TOO_HIGH, TOO_HIGH_IF_UNSURE
from train.run import command_line
from train.run.command_line import main, parse

ROOT = Path(__file__).parents[3]
H100, H200 = (GPUS[name].device.device_kind for name in ("H100", "H200"))
TENSOR, FSDP = MeshSizes(tensor=2), MeshSizes(fsdp=2)


def config(preset: str = "llama3-8b", layers: int | None = None, **changes) -> Config:
    default = PRESETS[preset]()
    layers = layers or default.model.num_layers
    model = dataclasses.replace(default.model, num_layers=layers)
    return dataclasses.replace(default, model=model, given=frozenset(changes), **changes)


def plan_of(preset: str, devices: int, layers: int | None = None, **changes) -> Plan:
    machine = Machine(devices, H100, GPUS["H100"].memory)
    return make_plan(config(preset, layers, **changes), machine)


STACKED: dict[str, Any] = {"remat": "full", "scan_layers": 1}
LONG: dict[str, Any] = {"loss_chunk": 4096, **STACKED}
# Llama 3 8B: layers, sequences, length, mesh, other settings, GPU, kernel of attention, ms.
MEASURED = {
    # 2026-11-25-train-8b-2-h200.md
    "8B": (32, 2, 8192, TENSOR, {}, H200, "cudnn", 778.5),
    "8B tensorwise": (32, 2, 8192, TENSOR, {"fp8": "tensorwise"}, H200, "cudnn", 606.5),
    "8B rowwise": (32, 2, 8192, TENSOR, {"fp8": "rowwise"}, H200, "cudnn", 664.5),
    "8B ZeRO 3": (32, 2, 8192, FSDP, {"zero": 3}, H200, "cudnn", 791.3),
    "8B ZeRO 3 tensorwise": (
        32, 2, 8192, FSDP, {"zero": 3, "fp8": "tensorwise"}, H200, "cudnn", 626.6
    ),
    # 2026-11-25-train-2-h100, 2026-11-25-attention-step-2-h100, 2026-11-23-step-1-h200.md
    "8 layers": (8, 1, 8192, TENSOR, {}, H100, "cudnn", 128.2),
    "8 layers flash3": (8, 1, 8192, TENSOR, {}, H100, "flash3", 125.0),
    "8 layers without rings": (8, 1, 8192, TENSOR, {"overlap": "xla"}, H100, "cudnn", 134.4),
    "8 layers ZeRO 3 full": (
        8, 2, 8192, FSDP, {"zero": 3, "remat": "full"}, H100, "cudnn", 287.9
    ),
    "8 layers 32k dots": (8, 1, 32768, TENSOR, {"remat": "dots"}, H100, "flash3", 611.5),
    "8 layers, one GPU": (8, 1, 8192, MeshSizes(), {}, H200, "cudnn", 238.5),
    # 2026-11-22-train-4-h200, 2026-11-25-restructured-2-h100.md
    "8 layers, tensor 4": (8, 1, 8192, MeshSizes(tensor=4), {}, H200, "cudnn", 68.4),
    "2 layers ZeRO 3": (2, 2, 8192, FSDP, {"zero": 3}, H100, "cudnn", 97.0),
    # Shapes that nothing was fitted to.
    # 2026-11-27-lora-2-h100.md, 2026-11-26-context-2-h100.md
    "full, stacked": (32, 2, 4096, TENSOR, STACKED, H100, "flash3", 485.5),
    "128k": (8, 1, 131072, TENSOR, LONG, H100, "flash3", 6025),
    "128k over context": (
        8, 1, 131072, MeshSizes(context=2), {"zero": 3, **LONG}, H100, "flash3", 6105
    ),
    "6 layers": (6, 1, 6144, TENSOR, {}, H100, "cudnn", 78.0),
    "6 layers tensorwise": (6, 1, 6144, TENSOR, {"fp8": "tensorwise"}, H100, "cudnn", 67.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_predictions_are_near_what_was_measured(name: str) -> None:
    layers, sequences, length, sizes, changes, kind, attention, measured = MEASURED[name]
    shape = {"batch_size": sequences, "sequence_length": length}
    predicted = predict(config(layers=layers, **shape, **changes), sizes, kind, attention=attention)
    assert 1e3 * predicted.time.total == pytest.approx(measured, rel=0.06)
    assert predicted.time.total == pytest.approx(sum(predicted.time.by_part.values()))


@pytest.mark.parametrize(
    ("sizes", "axes", "sequences", "length", "measured"),
    [(FSDP, "fsdp", 4, 8192, 169.7), (TENSOR, "tensor", 2, 16384, 193.8)],
)
def test_predictions_for_experts(sizes, axes, sequences, length, measured) -> None:
    """The report train-experts-2-h100 had the logits of all tokens at one time."""
    run = config(
        "qwen3-30b-a3b", 4, batch_size=sequences, sequence_length=length, expert_axes=axes,
        zero=3 if sizes.fsdp > 1 else 0, balance_loss_weight=0.0, loss_chunk=0,
    )  # fmt: skip
    predicted = predict(run, sizes, H100, attention="flash3")
    assert 1e3 * predicted.time.total == pytest.approx(measured, rel=0.06)


# Peaks of these reports, of compiled-memory-4-h200 (2026-11-25) and of train-experts-2-h100:
# preset, layers, sequences, length, mesh, other settings, GiB.
_EXPERTS = {"balance_loss_weight": 0.0, "loss_chunk": 0}
PEAKS = {
    "8B": ("llama3-8b", 32, 2, 8192, TENSOR, {}, 89.9),
    "8B tensorwise": ("llama3-8b", 32, 2, 8192, TENSOR, {"fp8": "tensorwise"}, 82.4),
    "8B ZeRO 3": ("llama3-8b", 32, 2, 8192, FSDP, {"zero": 3}, 83.9),
    "8B ZeRO 3 rowwise": ("llama3-8b", 32, 2, 8192, FSDP, {"zero": 3, "fp8": "rowwise"}, 87.2),
    "8B fsdp 4": ("llama3-8b", 32, 4, 8192, MeshSizes(fsdp=4), {"zero": 3}, 61.0),
    "8B 2 × 2": ("llama3-8b", 32, 2, 8192, MeshSizes(fsdp=2, tensor=2), {"zero": 3}, 42.0),
    "8B tensor 4": ("llama3-8b", 32, 1, 8192, MeshSizes(tensor=4), {}, 35.1),
    "8 layers": ("llama3-8b", 8, 1, 8192, TENSOR, {}, 24.0),
    "full": ("llama3-8b", 8, 2, 8192, FSDP, {"zero": 3, "remat": "full"}, 21.5),
    "dots": ("llama3-8b", 8, 1, 32768, TENSOR, {"remat": "dots"}, 37.3),
    "2 layers": ("llama3-8b", 2, 2, 8192, FSDP, {"zero": 3}, 15.5),
    "full, stacked": ("llama3-8b", 32, 2, 4096, TENSOR, STACKED, 60.4),
    # As programs are allocated that are compiled for GPUs by their description (plan-2-h100).
    "128k": ("llama3-8b", 8, 1, 131072, TENSOR, LONG, 39.2),
    "128k over context": (
        "llama3-8b", 8, 1, 131072, MeshSizes(context=2), {"zero": 3, **LONG}, 39.5
    ),
    # FlashAttention-3 allocates more besides; in use on GPUs (context-2-h100).
    "320k over context": (
        "llama3-8b", 8, 1, 327680, MeshSizes(context=2),
        {"zero": 3, "attention": "flash3", **LONG}, 69.4,
    ),
    "experts over fsdp": (
        "qwen3-30b-a3b", 4, 4, 8192, FSDP, {"zero": 3, "expert_axes": "fsdp", **_EXPERTS}, 34.8
    ),
    "experts over tensor": ("qwen3-30b-a3b", 4, 2, 16384, TENSOR, _EXPERTS, 35.2),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_memory_is_near_what_was_measured(name: str) -> None:
    preset, layers, sequences, length, sizes, changes, measured = PEAKS[name]
    run = config(preset, layers, batch_size=sequences, sequence_length=length, **changes)
    ratio = predict_memory(run, sizes).total / 2**30 / measured
    assert 0.965 <= ratio <= 1.07


# What a dry run traces, and the arithmetic: sequences, mesh, settings.
TRACED = {
    "one": (1, MeshSizes(), {}),
    "tensor": (2, TENSOR, {"remat": "dots"}),
    "ZeRO 3": (2, FSDP, {"zero": 3, "remat": "full"}),
    "ZeRO 3 tensor": (4, MeshSizes(fsdp=2, tensor=2), {"zero": 3}),
    "ZeRO 1 data": (4, MeshSizes(data=2, fsdp=2), {"zero": 1}),
    "microbatches": (4, TENSOR, {"gradient_accumulation_steps": 4}),
    "ZeRO 2 microbatches": (8, MeshSizes(fsdp=4), {"zero": 2, "gradient_accumulation_steps": 2}),
    "context": (2, MeshSizes(fsdp=2, tensor=2, context=2), {"zero": 3, "remat": "dots"}),
    "scan": (4, MeshSizes(fsdp=4), {"zero": 3, "scan_layers": 1}),
    "tensorwise": (2, TENSOR, {"fp8": "tensorwise"}),
}


@pytest.mark.parametrize("name", TRACED)
def test_memory_is_near_what_a_dry_run_traces(name: str) -> None:
    """Both count the logits and their gradient."""
    sequences, sizes, changes = TRACED[name]
    run = config(layers=3, batch_size=sequences, sequence_length=4096, **changes)
    check(run, sizes)
    traced = memory_of(run, make_abstract_mesh(sizes, GPUS["H100"].device), local_devices=8)
    estimate = predict_memory(run, sizes)
    assert estimate.state == pytest.approx(traced.state, rel=0.002)
    assert 0.95 <= estimate.total / traced.total <= 1 + TOO_HIGH


@pytest.mark.parametrize("sizes", [TENSOR, MeshSizes(context=2)], ids=["tensor", "context"])
def test_memory_that_flash_attention_allocates(
    sizes: MeshSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run, from the kernel's operands, and the plan count the same bytes."""
    monkeypatch.setattr(flash_attention, "missing_reason", lambda: None)
    changes = {"batch_size": 1, "sequence_length": 4096, "remat": "full"}
    run = config(layers=1, attention="flash3", **changes)
    heads, keys = 32 // sizes.tensor, 8 // sizes.tensor
    seen = 4096 * (1.25 if sizes.context == 2 else 1)
    expected = 4 * 128 * (4096 // sizes.context * heads + 2 * seen * keys)
    predicted = [
        predict_memory(dataclasses.replace(run, attention=name), sizes).total
        for name in ("flash3", "cudnn")
    ]
    assert predicted[0] - predicted[1] == expected
    jax.clear_caches()
    mesh = make_abstract_mesh(sizes, GPUS["H100"].device)
    traced = [memory_of(run, mesh, local_devices=8).total]
    monkeypatch.setattr(scratch, "_BYTES_OF", {})
    traced.append(memory_of(run, mesh, local_devices=8).total)
    jax.clear_caches()
    assert traced[0] - traced[1] == expected


def test_memory_of_experts() -> None:
    sizes = MeshSizes(fsdp=2, tensor=2)
    shape = {"batch_size": 4, "sequence_length": 2048, "zero": 3, "expert_axes": "both"}
    run = config("mixtral-8x7b", 2, **shape)
    traced = memory_of(run, make_abstract_mesh(sizes, GPUS["H100"].device), local_devices=8)
    assert 0.95 <= predict_memory(run, sizes).total / traced.total <= 1.10


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
            r"take ([\d,.]+) GB, and 69.0 GB may be used", plan.nearest["state does not fit"][1]
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


def test_a_slower_network_takes_longer_beyond_a_node_alone() -> None:
    run, sizes = config(zero=3, batch_size=64), MeshSizes(fsdp=64)
    fast, slow = (predict(run, sizes, H100, network_bytes=n).time for n in (50e9, 5e9))
    assert slow.weight_gathers > fast.weight_gathers
    assert slow.matmuls == fast.matmuls
    # What computation cannot hide grows with the time of the network.
    first, second = (predict(run, sizes, H100, network_bytes=n).time for n in (5e7, 5e6))
    assert second.weight_gathers == pytest.approx(10 * first.weight_gathers, rel=0.1)
    one = [predict(config(zero=3), MeshSizes(fsdp=8), H100, network_bytes=n) for n in (50e9, 5e9)]
    assert one[0] == one[1]


def test_what_computes_again_or_in_float32_takes_longer() -> None:
    def seconds(**changes) -> float:
        run = config(layers=8, loss_chunk=0, **changes)
        return predict(run, MeshSizes(), H100).time.total

    assert seconds() < seconds(remat="dots") < seconds(remat="full")
    assert seconds(fp8="tensorwise") < seconds(fp8="rowwise") < seconds()
    assert seconds() < seconds(compute_dtype="float32")
    assert seconds() < seconds(scan_layers=1)
    assert seconds() < seconds(gradient_accumulation_steps=8)


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


EIGHT = shlex.split("--preset llama3-8b --model.num-layers 4 --device H100 --devices 8")


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


@pytest.mark.parametrize(("layers", "fits"), [(2, True), (32, False)])
def test_a_plan_and_a_dry_run_end_alike(layers: int, fits: bool) -> None:
    model = shlex.split(f"--preset llama3-8b --device H100 --model.num-layers {layers}")
    for mode in (["--plan", "--devices", "1"], ["--dry-run", "--scan-layers", "1"]):
        outcome = contextlib.nullcontext() if fits else pytest.raises(SystemExit, match=r"^1$")
        with outcome:
            main([*model, *mode, "--mesh.data", "1", "--mesh.tensor", "1", "--batch-size", "1"])


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


def test_predicted_beside_measured() -> None:
    def record(seconds: float) -> Record:
        return Record(1, 2.0, 1.0, 1e-3, 1.0, 1.0, None, None, seconds, 0.0)

    run = config(layers=8, batch_size=1)
    prediction = predict_run(run, TENSOR, H100, "cudnn")
    line = describe_step_time(prediction, [record(1.5), record(0.131), record(0.130), record(0.2)])
    assert line == f"step time: predicted {1e3 * prediction.time.total:.0f} ms, measured 131 ms"
    assert "measured 1,500 ms" in describe_step_time(prediction, [record(1.5)])
    with pytest.raises(ValueError, match="no rates of cpu"):
        predict_run(run, TENSOR, "cpu", "cudnn")


def test_a_run_ends_with_its_predicted_step_time(monkeypatch, capsys) -> None:
    arguments = "--preset debug --steps 2 --log-interval 1 --batch-size 2 --sequence-length 32"
    arguments += " --model.num-layers 1 --mesh.data 1 --mesh.tensor 2"
    monkeypatch.setitem(RATES, "cpu", RATES[H100])
    main(arguments.split())
    line = r"^step time: predicted \d+\.\d ms, measured [\d,.]+ ms$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_a_dry_run_ends_with_the_predicted_step_time(capsys) -> None:
    arguments = "--dry-run --preset llama3-8b --model.num-layers 1 --batch-size 1 --mesh.data 1"
    main([*arguments.split(), "--mesh.tensor", "2", "--device", "H100"])
    output = capsys.readouterr().out
    last = output.splitlines()[-1]
    run = config(layers=1, batch_size=1)
    kernels = ("cudnn", "flash3")  # Which one depends on what is installed.
    predicted = [predict_run(run, TENSOR, H100, kernel) for kernel in kernels]
    assert last in [f"{each}; the run fits" for each in predicted]
    assert ", 1 sequence of 8,192 tokens per step" in output
    assert output.count("flash3 would") <= 1
    # The parts add up as they are printed.
    [parts, total] = re.findall(r"^the whole step, .*: (.*) = (.*) ms$", output, re.MULTILINE)[0]
    added = sum(float(part.rpartition(" ")[2]) for part in parts.split(" + "))
    assert f"predicted step: {total} ms" in last and added == pytest.approx(float(total), abs=1e-6)


def test_the_parts_of_long_and_short_steps_add_up() -> None:
    names = [each.name for each in dataclasses.fields(StepTime)]
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1e-2, 1.0):
        text = str(StepTime(**dict(zip(names, rng.uniform(0, scale, len(names)), strict=True))))
        parts, _, total = text.removesuffix(" ms").replace(",", "").partition(" = ")
        added = sum(float(part.rpartition(" ")[2]) for part in parts.split(" + "))
        assert added == pytest.approx(float(total), abs=1e-6)


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


def test_rings_of_weights_wait_for_their_host_where_matmuls_are_small() -> None:
    """Seven permutes of each of seven weights of a layer take longer than its matmuls; then the ops
    choose collectives, which nothing hides there."""

    def exposed(preset: str, shards: int) -> float:
        run = config(
            preset,
            zero=3,
            weight_gather="matmuls",
            batch_size=shards,
            sequence_length=4096,
        )
        time = predict(run, MeshSizes(fsdp=shards), H100).time
        return (time.weight_gathers + time.gradient_sums) / time.total

    assert exposed("llama3-8b", 8) < 0.05
    assert exposed("llama3.2-1b", 2) < 0.05
    assert exposed("llama3.2-1b", 8) > 0.2


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


def test_every_gpu_of_a_dry_run_has_rates() -> None:
    assert {gpu.device.device_kind for gpu in GPUS.values()} == RATES.keys()


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


def test_a_prediction_names_all_that_was_not_measured() -> None:
    """A mesh beyond a node has both the number of GPUs and the network."""
    run, count, network = config(), "steps were measured on up to 4 GPUs", "50 GB/s per GPU between"
    for devices, expected in ((4, []), (8, [count]), (16, [count, network])):
        reasons = predict_run(run, MeshSizes(fsdp=devices), H100, "cudnn").extrapolated
        assert [each for each in (count, network) if each in reasons] == expected


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


# The report lora-2-h100: preset, mesh, remat, backend, format of frozen weights, ms, GiB.
WITH_ADAPTERS = {
    "70B": ("llama3-70b", TENSOR, "full", "auto", "rowwise", 2087.0, 43.7),
    "70B xla": ("llama3-70b", TENSOR, "full", "xla", "rowwise", 2244.6, 43.2),
    "70B projections": ("llama3-70b", TENSOR, "projections", "auto", "rowwise", 1984.8, 59.7),
    "70B attention": ("llama3-70b", TENSOR, "attention", "auto", "rowwise", 2078.1, 48.2),
    "8B": ("llama3-8b", TENSOR, "none", "auto", None, 344.5, 34.4),
    "8B xla": ("llama3-8b", TENSOR, "none", "xla", None, 381.6, 34.5),
    "8B data": ("llama3-8b", MeshSizes(data=2), "none", "auto", None, 347.3, 48.5),
    "8B rowwise": ("llama3-8b", TENSOR, "none", "auto", "rowwise", 281.6, 27.9),
}


@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_predictions_with_adapters_are_near_what_was_measured(name: str) -> None:
    preset, sizes, remat, overlap, stored, milliseconds, gib = WITH_ADAPTERS[name]
    shape: dict[str, Any] = {"batch_size": 2, "sequence_length": 4096, "scan_layers": 1}
    lora = LoraConfig(rank=16, base_format=stored)
    run = config(preset, lora=lora, remat=remat, overlap=overlap, **shape)
    predicted = predict(run, sizes, H100, attention="flash3")
    assert 1e3 * predicted.time.total == pytest.approx(milliseconds, rel=0.065)
    assert 0.96 <= predict_memory(run, sizes).total / 2**30 / gib <= 1.01


ADAPTERS, IN_8_BITS = LoraConfig(rank=16), LoraConfig(rank=16, base_format="rowwise")
# Sequences, mesh, settings, the most by which the plan may be too high.
FROZEN: dict[str, tuple[int, MeshSizes, dict[str, Any], float]] = {
    "adapters": (2, TENSOR, {"lora": ADAPTERS}, 1.05),
    "scan": (2, TENSOR, {"lora": ADAPTERS, "scan_layers": 1}, 1.05),
    "8 bits": (2, TENSOR, {"lora": IN_8_BITS, "remat": "dots"}, 1.05),
    "ZeRO 1": (4, MeshSizes(fsdp=4), {"lora": ADAPTERS, "zero": 1}, 1.05),
    # The table of the head is gathered beside the logits in the plan, and before in the dry run.
    "ZeRO 3": (4, MeshSizes(fsdp=4), {"lora": ADAPTERS, "zero": 3}, 1.30),
    # A loop over microbatches has copies of the shards.
    "ZeRO 3, microbatches": (
        8,
        MeshSizes(fsdp=2, tensor=2),
        {"lora": ADAPTERS, "zero": 3, "remat": "dots", "gradient_accumulation_steps": 2},
        1.05,
    ),
    "ZeRO 3, 8 bits": (4, MeshSizes(fsdp=2, tensor=2), {"lora": IN_8_BITS, "zero": 3}, 1.05),
    "two layers": (2, TENSOR, {"lora": LoraConfig(rank=16, targets="q_proj,v_proj")}, 1.15),
    "frozen by name": (2, TENSOR, {"freeze": "embedding,layers.attention.*"}, 1.05),
}


@pytest.mark.parametrize("name", FROZEN)
def test_memory_beside_frozen_weights_is_near_what_a_dry_run_traces(name: str) -> None:
    sequences, sizes, changes, most = FROZEN[name]
    run = config(layers=3, batch_size=sequences, sequence_length=4096, **changes)
    check_sharded(run, sizes)
    traced = memory_of(run, make_abstract_mesh(sizes, GPUS["H100"].device), local_devices=8)
    estimate = predict_memory(run, sizes)
    assert estimate.state == pytest.approx(traced.state, rel=0.002)
    assert 0.95 <= estimate.total / traced.total <= most <= 1 + TOO_HIGH_IF_UNSURE


@pytest.mark.parametrize("changes", [{"lora": ADAPTERS}, {"freeze": "layers.attention.*"}])
def test_mfu_counts_the_flops_of_what_is_trained(changes: dict[str, Any]) -> None:
    run = config(layers=2, batch_size=1, sequence_length=4096, **changes)
    predicted = predict(run, MeshSizes(), H100)
    flops = ModelFunctions(run).flops_per_token(4096)
    peak = peak_flops(H100)
    assert peak is not None
    assert predicted.mfu == pytest.approx(flops * predicted.tokens_per_second / peak, rel=1e-3)


def test_adapters_are_planned(capsys) -> None:
    """And what does not fit otherwise is advised with flags that a plan takes."""
    large = shlex.split("--plan --preset llama3-70b --device H100 --devices 2 --batch-size 2")
    advised = ["--lora.rank 16", "--lora.base-format rowwise"]
    for advice in advised:
        with pytest.raises(SystemExit, match=r"^1$"):
            main(large)
        assert advice in capsys.readouterr().out.splitlines()[-1]
        large += advice.split()
    main(large)
    output = capsys.readouterr().out
    [command] = re.findall("^to run the first: python -m train (.*)$", output, re.MULTILINE)
    assert parse(shlex.split(command)).lora == IN_8_BITS
    assert "rows in 8 bits (--lora.base-format) round" in output
    assert "MFU does not count gradients for frozen weights" in output
    # What a run would refuse.
    with pytest.raises(SystemExit):
        main([*large, "--lora.train", "layers.feed_forward.up.kernel"])
    assert "one gather for all its layers; train all of its" in " ".join(
        capsys.readouterr().err.split()
    )


def test_adapters_have_rows_in_8_bits_and_a_mesh_that_gathers_what_is_frozen(capsys) -> None:
    main(["--plan", *EIGHT, "--lora.rank", "16", "--batch-size", "8"])
    output = capsys.readouterr().out
    commands = dict(re.findall("^to (.*?): python -m train (.*)$", output, re.MULTILINE))
    in_8_bits = parse(shlex.split(commands["run the first in 8 bits"]))
    assert (in_8_bits.fp8, in_8_bits.lora.base_format) == (None, "rowwise")
    plan = plan_of("llama3-8b", 8, layers=4, lora=ADAPTERS, zero=3, sequence_length=32_768)
    assert plan.candidates
    for candidate in plan.candidates:  # Matmuls gather over one axis.
        assert candidate.sizes.context == 1
    assert "zero" in plan.refused
