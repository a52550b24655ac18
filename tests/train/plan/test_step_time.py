"""Predicted step times, beside what was measured, and where they are printed.

Measured steps are those of benchmarks/reports. The rates were fitted to some of them, so these
tests say that the arithmetic is what it was, not how good it is for other configurations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex

import numpy as np
import pytest

from tests.train.plan.plans import FSDP, H100, H200, LONG, STACKED, TENSOR, config
from train.config.config import MeshSizes
from train.log.metrics import Record
from train.memory.device_memory import GPUS
from train.plan.rates import RATES
from train.plan.run import describe_step_time, predict_run
from train.plan.step_time import StepTime, predict
from train.run.command_line import main

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


@pytest.mark.parametrize(("layers", "fits"), [(2, True), (32, False)])
def test_a_plan_and_a_dry_run_end_alike(layers: int, fits: bool) -> None:
    model = shlex.split(f"--preset llama3-8b --device H100 --model.num-layers {layers}")
    for mode in (["--plan", "--devices", "1"], ["--dry-run", "--scan-layers", "1"]):
        outcome = contextlib.nullcontext() if fits else pytest.raises(SystemExit, match=r"^1$")
        with outcome:
            main([*model, *mode, "--mesh.data", "1", "--mesh.tensor", "1", "--batch-size", "1"])


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


def test_every_gpu_of_a_dry_run_has_rates() -> None:
    assert {gpu.device.device_kind for gpu in GPUS.values()} == RATES.keys()


def test_a_prediction_names_all_that_was_not_measured() -> None:
    """A mesh beyond a node has both the number of GPUs and the network."""
    run, count, network = config(), "steps were measured on up to 4 GPUs", "50 GB/s per GPU between"
    for devices, expected in ((4, []), (8, [count]), (16, [count, network])):
        reasons = predict_run(run, MeshSizes(fsdp=devices), H100, "cudnn").extrapolated
        assert [each for each in (count, network) if each in reasons] == expected
