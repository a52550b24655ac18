"""Processes of a node share its GPUs evenly, or are refused, in environments as launchers make."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint

import pytest

from tests.train.processes.test_launchers import KUBERNETES, OPEN_MPI, SLURM_PER_GPU
from train.processes import gpu_binding
from train.processes.gpu_binding import (
    InstalledGpu,
    View,
    VisibleGpu,
    installed_gpus,
    jax_uses_gpus,
    own_share,
    parse_list,
    view,
    visible_gpus,
)

LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4aac5a7f-2c1c-9a1a-3c8c-0d1b7f0a8c01)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-4bd0c1f3-8e5e-7a52-51f2-c0ad4f9b2f02)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-5ce8f9c1-0e2e-1a1a-2c2c-3d3d4e4e5f03)
"""
LISTED_MIG = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4aac5a7f-2c1c-9a1a-3c8c-0d1b7f0a8c01)
  MIG 3g.40gb     Device  0: (UUID: MIG-11d1bb2f-6ad5-5f4a-8f7a-3c1f0fd2d101)
  MIG 3g.40gb     Device  1: (UUID: MIG-22d1bb2f-6ad5-5f4a-8f7a-3c1f0fd2d102)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-4bd0c1f3-8e5e-7a52-51f2-c0ad4f9b2f02)
"""
A, B, C = (gpu.name for gpu in parse_list(LISTED))
MIG_A, MIG_B = parse_list(LISTED_MIG)[0].mig_devices


def node(prefix: str, gpus: int) -> list[InstalledGpu]:
    return [InstalledGpu(f"GPU-{prefix}{number}") for number in range(gpus)]


def shares(
    environments: Sequence[tuple[Mapping[str, str], Sequence[InstalledGpu]]],
) -> list[list[str]]:
    """Shares that processes take, by their variables and the GPUs that they may open."""
    seen = [visible_gpus(variables, installed) for variables, installed in environments]
    views = [view(e[0], gpus) for e, gpus in zip(environments, seen, strict=True)]
    return [own_share(views, number, gpus) for number, gpus in enumerate(seen)]


ALL: list[str] = []


@pytest.mark.parametrize(
    ("variables", "installed", "expected"),
    [
        pytest.param([{}] * 2, node("a", 2), [["0"], ["1"]], id="by hand, nothing bound"),
        pytest.param([{}] * 2, node("a", 8), [[*"0123"], [*"4567"]], id="halves"),
        pytest.param(
            [SLURM_PER_GPU] * 8, node("a", 8), [[n] for n in "01234567"], id="Slurm, a task per GPU"
        ),
        pytest.param([OPEN_MPI] * 2, node("a", 4), [["0", "1"], ["2", "3"]], id="Open MPI"),
        pytest.param(
            [{"CUDA_VISIBLE_DEVICES": "6,3,1,0"}] * 2,
            node("a", 8),
            [["6", "3"], ["1", "0"]],
            id="of the visible",
        ),
        pytest.param(
            [{"CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_VISIBLE_DEVICES": "0,1"}],
            node("a", 2),
            [["1"], ["0"]],
            id="in another order",
        ),
        pytest.param(
            [{"CUDA_VISIBLE_DEVICES": f"{A},{C}"}, {"CUDA_VISIBLE_DEVICES": "0,2"}],
            parse_list(LISTED),
            [[A], ["2"]],
            id="by UUID and by number",
        ),
        pytest.param(
            [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}],
            node("a", 2),
            [ALL, ALL],
            id="bound by CUDA_VISIBLE_DEVICES",
        ),
        pytest.param(
            [{"JAX_LOCAL_DEVICE_IDS": "0"}, {"JAX_LOCAL_DEVICE_IDS": "1"}],
            node("a", 2),
            [ALL, ALL],
            id="bound by JAX_LOCAL_DEVICE_IDS",
        ),
        pytest.param(
            [{"JAX_CUDA_VISIBLE_DEVICES": "1"}, {"JAX_CUDA_VISIBLE_DEVICES": "0"}],
            node("a", 2),
            [ALL, ALL],
            id="bound by JAX_CUDA_VISIBLE_DEVICES",
        ),
        pytest.param(
            [{"CUDA_VISIBLE_DEVICES": f"{A},{B}"}] * 2,
            [InstalledGpu(f"node/dev/nvidia{number}") for number in range(2)],
            [[A], [B]],
            id="by UUID, without nvidia-smi",
        ),
        pytest.param([{}] * 3, [], [ALL] * 3, id="simulated devices"),
        pytest.param([{"CUDA_VISIBLE_DEVICES": ""}] * 2, node("a", 1), [ALL, ALL], id="none"),
        pytest.param([{}] * 2, parse_list(LISTED_MIG)[:1], [[MIG_A], [MIG_B]], id="MIG"),
        pytest.param(
            [{"CUDA_VISIBLE_DEVICES": f"{MIG_B},{MIG_A}"}] * 2,
            parse_list(LISTED_MIG),
            [[MIG_B], [MIG_A]],
            id="MIG by name",
        ),
    ],
)
def test_shares_of_a_node(variables, installed, expected):
    assert shares([(named, installed) for named in variables]) == expected


def test_each_node_shares_its_own():
    assert shares([({}, node(name, 4)) for name in ("a", "a", "b")]) == [["0", "1"], ["2", "3"], []]
    # Neighbours may have any numbers.
    assert shares([({}, node(name, 2)) for name in "abab"]) == [["0"], ["0"], ["1"], ["1"]]


def test_launchers_that_bind_are_left_alone():
    # Slurm's control groups, and the pods of one node, show each process its own GPU as number 0.
    bound = SLURM_PER_GPU | {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    for variables in (bound, KUBERNETES):
        assert shares([(variables, node(name, 1)) for name in "abcd"]) == [ALL] * 4


@pytest.mark.parametrize(
    ("variables", "gpus", "sentence"),
    [
        ([{}] * 3, 8, "processes 0, 1, 2 are on a node where they see the same 8 GPUs, which 3"),
        ([{}] * 2, 1, "see the same 1 GPU, which 2 processes cannot share evenly; start one"),
        ([{}, {"CUDA_VISIBLE_DEVICES": "1"}], 2, "processes 0 and 1 both use GPU-a1; let all"),
        ([{"CUDA_VISIBLE_DEVICES": "0"}] * 2, 2, "see the same 1 GPU"),
        ([{"JAX_LOCAL_DEVICE_IDS": "0"}] * 2, 2, "processes 0 and 1 both use GPU-a0; let all"),
        ([{"JAX_LOCAL_DEVICE_IDS": "0"}, {}], 2, "processes 0 and 1 both use GPU-a0"),
        (
            [{"CUDA_VISIBLE_DEVICES": n} for n in ("0,1", "1,2", "2,3")],
            4,
            "processes 0 and 1 both use GPU-a1",
        ),
        ([{}, {"JAX_LOCAL_DEVICE_IDS": "2"}], 2, r"IDS='2': expected numbers of .* sees 2 GPUs"),
        ([{}, {"JAX_LOCAL_DEVICE_IDS": "a"}], 2, "JAX_LOCAL_DEVICE_IDS='a': expected numbers"),
    ],
)
def test_gpus_that_cannot_be_shared_are_refused(variables, gpus, sentence):
    with pytest.raises(ValueError, match=sentence):
        shares([(named, node("a", gpus)) for named in variables])


def test_all_processes_refuse_for_a_node_of_others():
    views = [View(["GPU-a"]), View(["GPU-b"]), View(["GPU-b"])]
    for number in range(3):
        with pytest.raises(ValueError, match="processes 1, 2 are on a node"):
            own_share(views, number, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,2", [A, C]),
        (f"{B},{A}", [B, A]),
        (" 1 , 0 ", [B, A]),
        ("GPU-5ce8", [C]),
        # CUDA takes what comes before a name that it does not know.
        ("1,-1,0", [B]),
        ("7,0", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("", []),
    ],
)
def test_what_cuda_shows(value, expected):
    seen = visible_gpus({"CUDA_VISIBLE_DEVICES": value}, parse_list(LISTED))
    assert [gpu.name for gpu in seen] == expected


def test_mig_devices_take_the_place_of_their_gpu():
    installed = parse_list(LISTED_MIG)
    seen = visible_gpus({}, installed)
    assert seen == [VisibleGpu(MIG_A, MIG_A), VisibleGpu(MIG_B, MIG_B), VisibleGpu("1", B)]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-22"}, installed) == [
        VisibleGpu("MIG-22", MIG_B)
    ]


def test_the_files_of_devices_where_nvidia_smi_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_binding, "_device_files", lambda: [InstalledGpu("node/dev/nvidia0")])
    assert installed_gpus() == [InstalledGpu("node/dev/nvidia0")]
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '%s' '{LISTED}'\n")
    script.chmod(0o755)
    assert [gpu.name for gpu in installed_gpus()] == [A, B, C]
    script.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert installed_gpus() == [InstalledGpu("node/dev/nvidia0")]


def test_files_of_devices_that_can_be_opened(tmp_path):
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia0").mkdir()  # As a control group, it does not let itself be opened.
    names = [gpu.name.rpartition("/")[2] for gpu in gpu_binding._device_files(tmp_path)]
    assert names == ["nvidia2", "nvidia10"]


@pytest.mark.parametrize(
    ("platforms", "expected"),
    [("cpu", False), ("cuda,cpu", True), ("gpu", True), ("", True), (None, True)],
)
def test_whether_jax_would_open_gpus(monkeypatch, platforms, expected):
    plugin = EntryPoint("xla_cuda13", "jax_plugins.xla_cuda13", "jax_plugins")
    monkeypatch.setattr(gpu_binding, "entry_points", lambda *, group: [plugin])
    assert jax_uses_gpus(platforms) is expected
    monkeypatch.setattr(gpu_binding, "entry_points", lambda *, group: [])
    assert jax_uses_gpus(platforms) is (expected and bool(platforms))


def test_a_driver_that_does_not_answer_ends_in_a_sentence(monkeypatch):
    def wait(*_, **__):
        raise subprocess.TimeoutExpired("nvidia-smi", 120)

    monkeypatch.setattr(subprocess, "run", wait)
    with pytest.raises(ValueError, match=r"^nvidia-smi -L: no answer from the NVIDIA driver"):
        installed_gpus()
