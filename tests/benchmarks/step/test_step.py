"""The parts of a training step: where kernels belong, that times add up, and what floors are."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import jax
import pytest

from benchmarks import command_line
from benchmarks.step import budget, step
from benchmarks.step.train import TrainCase
from benchmarks.timeline.analysis import DeviceTimeline, Kind, analyze
from benchmarks.timeline.trace import Event, Trace
from train.config.config import MeshSizes

GEMM, KERNEL, PERMUTE = "nvjet_sm90", "loop_add_fusion", "MemcpyP2P"
H200 = budget.RATES["NVIDIA H200"]
PROFILES = Path(__file__).parents[2] / "data" / "step_profiles.json"

#: Kernel, instruction, its op_name, start and end; 100 µs.
EVENTS = [
    (GEMM, "custom-call.1", "jit(step)/jvp(jit(compute))/jvp(feed_forward)/dot_general", 0, 40),
    (KERNEL, "fusion.1", "jit(step)/jvp(norm)/mul", 10, 30),
    (KERNEL, "fusion.2", "jit(step)/transpose(jvp(head))/jvp(head)/checkpoint/mul", 30, 45),
    (PERMUTE, "collective-permute-start.1", "jit(step)/jvp(qkv)/ppermute", 20, 60),
    ("ncclDevKernel_AllGather", "all-gather-start", "jit(step)/weights/all_gather", 50, 70),
    (GEMM, "custom-call.2", "jit(step)/transpose(jvp(head))/dot_general", 65, 68),
    (KERNEL, "fusion.3", "jit(step)/optimizer/add", 90, 100),
]


def timeline_of(
    events: list[tuple], executions: int = 1, device: str = "/device:GPU:0"
) -> tuple[DeviceTimeline, dict[str, str]]:
    """The timeline of (kernel, instruction, op_name, start, end), and the op_names."""
    made = [Event(device, "", kernel, start, end, op) for kernel, op, _, start, end in events]
    host = [Event("/host:CPU", "", "timed", made[0].start, 0)]
    (timeline,) = analyze(Trace({device: made}, host), executions=executions, since="timed")
    return timeline, {op: name for _, op, name, _, _ in events if name}


def recorded(layers: str) -> tuple[DeviceTimeline, dict[str, str]]:
    """A step on one H200, which has what one of two devices has of 8 layers of Llama 3 8B."""
    profiles = json.loads(PROFILES.read_text())
    words, numbers = profiles[layers]["words"], profiles[layers]["events"]
    events = [
        (words[kernel], f"{words[op]}.{i}", words[name], start / 10, end / 10)
        for i, (start, end, kernel, op, name) in enumerate(zip(*[iter(numbers)] * 5, strict=True))
    ]
    return timeline_of(events)


def test_each_instant_counts_once():
    spent = budget.spend(*timeline_of(EVENTS))
    assert spent == {
        ("feed forward matmuls", "forward"): 40,
        ("head other kernels", "backward"): 5,
        ("exposed collective-permute", "forward"): 15,
        ("exposed all-gather", ""): 7,
        ("head matmuls", "backward"): 3,
        ("optimizer", ""): 10,
        ("idle", ""): 20,
    }


def test_rows_are_of_an_average_device_and_execution():
    first, names = timeline_of(EVENTS, executions=2)
    later = [(*event[:3], event[3] + 50, event[4] + 60) for event in EVENTS[:1]]
    second, _ = timeline_of(later, executions=2, device="/device:GPU:1")
    rows = budget.make_rows([first, second], names, {"optimizer": 0.001, "loss": 0.5, "idle": None})
    by_part = {row.part: row for row in rows}
    assert by_part["feed forward matmuls"] == ("feed forward matmuls", 0.0225, 0.0225, 0, 0)
    assert by_part["optimizer"] == ("optimizer", 0.0025, 0, 0, 0.001)
    assert by_part["loss"] == rows[-1] == ("loss", 0, 0, 0, 0.5)
    assert by_part["idle"].floor is None
    assert sum(row.time for row in rows) == pytest.approx((100 + 50) / 4 / 1e3)
    assert rows[0].part == "feed forward matmuls"


@pytest.mark.parametrize(
    ("kernel", "op", "name", "part", "direction"),
    [
        (GEMM, "custom-call", "jit(step)/jvp(jit(compute))/jvp(qkv)/dot", "qkv matmuls", "forward"),
        (
            KERNEL,
            "f",
            "jit(step)/transpose(jvp(loss))/jvp(norm)/checkpoint/mul",
            "norm",
            "backward",
        ),
        (KERNEL, "f", "jit(step)/optimizer/mul;jit(step)/shard_map", "optimizer", ""),
        (KERNEL, "f", "jit(step)/gradient_norm/reduce_sum", "gradient norm", ""),
        (GEMM, "f", "jit(step)/jvp(attention)/dot_general", "attention", "forward"),
        ("Memset 3", "f", "jit(step)/jvp(head)/dot_general", "head other kernels", "forward"),
        (KERNEL, "f", "jit(step)/jvp()/while/body/jvp(rotary)/mul", "rotary", "forward"),
        (KERNEL, "f", "jit(step)/jvp()/while/body/dynamic_slice", "arrays of loops", "forward"),
        ("MemcpyD2D", "loop_dynamic_update_slice_fusion.2", "", "arrays of loops", ""),
        # Neither arguments nor functions are scopes.
        (KERNEL, "copy", "state['params']['layers.0.norm.scale']", "other", ""),
        (KERNEL, "f", "jit(step)/jit(norm)/attention_mask/mul", "other", ""),
        (PERMUTE, "collective_permute_start.3", "", "exposed collective-permute", ""),
        (PERMUTE, "async-start", "", "exposed peer copy", ""),
    ],
)
def test_the_innermost_scope_counts(kernel, op, name, part, direction):
    event = Event("", "", kernel, 0, 1, op)
    assert budget.part_of(event, {op: name} if name else {}) == (part, direction)


def test_names_of_instructions_are_read_from_the_program():
    hlo = (
        'ENTRY %main {\n  %p = f32[] parameter(0), metadata={op_name="x"}\n'
        "  %copy.1 = f32[] copy(%p)\n"
        '  ROOT %fusion.2 = f32[2]{0} fusion(%p), metadata={op_name="jit(step)/norm/mul" id=1}\n}'
    )
    assert budget.instruction_names(hlo) == {"p": "x", "fusion.2": "jit(step)/norm/mul"}


@pytest.mark.parametrize("layers", ["layers", "scanned layers"])
def test_a_recorded_step_adds_up_and_is_known(layers):
    timeline, names = recorded(layers)
    spent = budget.spend(timeline, names)
    assert sum(spent.values()) == pytest.approx(timeline.duration)
    time = {part: 0.0 for part, _ in spent}
    for (part, _), microseconds in spent.items():
        time[part] += microseconds / 1e3
    assert time["other"] < 0.05
    assert (time.get("arrays of loops", 0) > 5) == (layers == "scanned layers")
    # Attention has kernels that count as matmuls too.
    matmuls = sum(time[part] for part in time if part.endswith("matmuls"))
    assert matmuls == pytest.approx(timeline.busy[Kind.MATMUL] / 1e3, abs=0.4)
    floors = budget.make_floors(TrainCase("llama3-8b", 8, 8192, 1, "none").config(), TWO, H200)
    for part, floor in floors.items():
        # Nothing is faster than its floor, but for what rates vary by.
        assert floor is not None and 0.96 * floor < time[part]


TWO = MeshSizes(tensor=2)


def floors_of(sizes: MeshSizes, flags: str = "", **case) -> Mapping[str, float | None]:
    made = {"layers": 8, "tokens": 8192, "sequences": 1, "remat": "none"} | case
    return budget.make_floors(TrainCase("llama3-8b", trainer=flags, **made).config(), sizes, H200)


def test_floors_of_8_layers_on_2_devices():
    floors = floors_of(TWO)
    matmuls = {part: floor for part, floor in floors.items() if part.endswith("matmuls")}
    assert len(matmuls) == 4
    weights = 8 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336) + 4096 * 128_256
    assert sum(matmuls.values()) == pytest.approx(6e3 * 8192 * weights / 2 / 790e12)  # type: ignore
    assert sum(matmuls.values()) == pytest.approx(71, abs=0.5)  # type: ignore
    # Parameters, of which the embedding has no matmul, their moments, and gradients in bfloat16.
    parameters = (weights + 4096 * 128_256) / 2
    # The weights of matmuls are written in bfloat16 too, and not made of parameters again.
    written = 2 * weights / 2
    assert floors["optimizer"] == pytest.approx(1e3 * (parameters * 26 + written) / 4.3e12)
    assert floors["gradient norm"] == pytest.approx(1e3 * parameters * 2 / 4.3e12)
    assert floors["weights"] == 0
    assert floors_of(TWO, remat="full")["weights"] == pytest.approx(1e3 * weights / 2 * 6 / 4.3e12)
    # Two products of half the pairs of tokens, 3.5 times with the backward.
    attention = 3.5 * 4 * 8 * 4096 * 8192 * 8192 / 2
    assert floors["attention"] == pytest.approx(1e3 * attention / 2 / 790e12)
    assert floors["loss"] == pytest.approx(1e3 * 3 * 8192 * 128_256 / 2 * 2 / 4.3e12)
    assert "gradient accumulation" not in floors


def test_floors_know_remat_meshes_and_dtypes():
    plain, full, dots = (floors_of(TWO, remat=remat) for remat in ("none", "full", "dots"))
    ratio = {part: (full[part] or 0) / (floor or 1) for part, floor in plain.items()}
    assert ratio["qkv matmuls"] == pytest.approx(4 / 3) and ratio["head matmuls"] == 1
    assert ratio["feed forward matmuls"] == pytest.approx(11 / 9)
    assert ratio["attention"] == pytest.approx(4.5 / 3.5)
    assert ratio["rotary"] == pytest.approx(1.5)
    saved = {part for part in plain if part.endswith("matmuls")} | {"attention"}
    assert dots == {**full, **{part: plain[part] for part in saved}}
    assert floors_of(TWO, remat="attention") == {**full, "attention": plain["attention"]}

    mesh = MeshSizes(data=2, fsdp=2, tensor=2)
    sharded = floors_of(mesh, zero=3, sequences=8)
    assert sharded["loss"] == 2 * (plain["loss"] or 0)  # 8 sequences on 8 devices instead of 2.
    # Half the parameters; gradients are summed in float32.
    assert sharded["optimizer"] == pytest.approx((full["optimizer"] or 0) / 2 * 28 / 26)
    narrow = floors_of(mesh, "--gradient-dtype bfloat16", zero=3, sequences=8)
    assert narrow["gradient norm"] == pytest.approx((plain["gradient norm"] or 0) / 2)
    assert sharded["gradient norm"] == pytest.approx(plain["gradient norm"])
    several = floors_of(TWO, "--gradient-accumulation-steps 2", sequences=2)
    assert several["gradient norm"] == 2 * (plain["gradient norm"] or 0)
    assert several["gradient accumulation"] == pytest.approx(10 * (plain["gradient norm"] or 0))
    muon = floors_of(TWO, "--optimizer.kind muon")
    assert muon["optimizer"] is None and muon["norm"] == plain["norm"]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every profile is `EVENTS`; the list gets all op_names of the compiled program."""
    timeline, names = timeline_of(EVENTS)
    found: list[str] = []

    def read(hlo: str) -> dict[str, str]:
        found.extend(re.findall('op_name="([^"]*)"', hlo))
        return names

    monkeypatch.setattr(step, "record_timelines", lambda run, folder: [timeline])
    monkeypatch.setattr(budget, "instruction_names", read)
    return found


COMMAND = (
    "step --platform cpu --preset debug --layers 2 --sequence-length 16 --sequences 4 --groups 1"
    " --group-seconds 1e-6 --dtype float32 --output"
)


def test_the_command_prints_its_table_last(tmp_path: Path, capsys, profiled: list[str]):
    flags = "--mesh.fsdp 2 --gradient-accumulation-steps 2"
    command_line.main(
        [*COMMAND.split(), str(tmp_path), "--devices", "4", "--zero", "1", f"--trainer={flags}"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[-8:]] == [
        *("| feed forward matmuls", "| idle", "| exposed collective-permute", "| optimizer"),
        *("| exposed all-gather", "| head other kernels", "| head matmuls", "| all"),
    ]
    assert lines[-1] == "| all | 0.10 | 0.06 | 0.01 |  |  |  |"
    assert "rates" in (tmp_path / "report.json").read_text()
    report = (tmp_path / "report.md").read_text()
    assert "debug 2 layers 4×16 ZeRO 1, auto, data=1 × fsdp=2 × tensor=2" in report
    assert "This device has no known floors" in report and lines[-1] in report
    # Every scope is one of the model or the trainer.
    pattern = budget._SCOPE
    assert {scope for name in profiled for scope in pattern.findall(name)} == set(budget.SCOPES)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--preset huge", "preset: 'huge' is unknown"),
        ("--candidate compute_only", "candidate: 'compute_only' is unknown"),
        (
            "--devices 2 --trainer='--mesh.data 1 --mesh.tensor 1'",
            "devices=2: the trainer's mesh is data=1",
        ),
        ("--devices 3", "num_heads=16 is not divisible by a tensor axis of 3 devices"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, capsys, monkeypatch, arguments, sentence):
    monkeypatch.delattr(step, "trace")
    with pytest.raises(SystemExit):
        command_line.main([*COMMAND.split(), str(tmp_path), *shlex.split(arguments)])
    assert sentence in capsys.readouterr().err


def test_profiles_of_cpus_hold_no_work(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        command_line.main([*COMMAND.split(), str(tmp_path), "--devices", "1"])
    assert "the trace holds no work of GPUs" in capsys.readouterr().err


def test_known_rates_are_in_the_report(tmp_path: Path, profiled, monkeypatch):
    monkeypatch.setitem(budget.RATES, jax.devices()[0].device_kind, H200)
    report = step.run(step.Step(platform="cpu", devices=1, preset="debug", layers=1, groups=1,
        sequence_length=16, group_seconds=1e-6, output=tmp_path))  # fmt: skip
    (row,) = [row for row in report.content["cases"][0]["rows"] if row["part"] == "optimizer"]
    assert row["floor"] > 0
    assert "at 790 TFLOP/s of matmuls and 4.3 TB/s" in (tmp_path / "report.md").read_text()
