"""Tuning: what is measured, what is saved, and that it decides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import __main__ as command
from collective_matmul import all_gather_matmul, explain, overlap, overlap_jit, tune
from collective_matmul.data import Run
from collective_matmul.dispatch.tables.table import COMPUTE_ONLY, Entry, Table
from collective_matmul.dispatch.tables.table_files import cache_path, save
from collective_matmul.layers import ColumnParallelLinear
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.matmul import model_requests
from collective_matmul.ops.matmul.backends import BACKENDS
from collective_matmul.ops.matmul.request import Einsum, Site
from collective_matmul.tuning import trials as trying
from collective_matmul.tuning import tune as tuning
from collective_matmul.tuning.timing import Timing
from collective_matmul.tuning.trials import trials
from tests.conftest import MeshFactory
from tests.dispatch.sites import BFLOAT16, H200, site_of
from tests.explained import flat_arguments, plain
from tests.reference import AXIS

FLOAT32 = np.dtype("float32")
JAX_VERSION = jax.__version__


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path / "cache"))
    path = cache_path(jax.devices()[0].device_kind)
    assert path is not None
    return path


def read(path: Path) -> Table:
    return Table.from_text(path.read_text(encoding="utf-8"))


def ring_is_fastest(candidates: Mapping, *, groups: int, seconds_per_group: float = 1.0) -> dict:
    """Stands in for `measure`, after one call of each candidate."""
    del groups, seconds_per_group
    jax.block_until_ready([run() for run in candidates.values()])
    return {name: Timing((1.0 if name == "ring" else 2.0,)) for name in candidates}


def test_what_is_tuned_decides(
    cache: Path, make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sites of an op and its gradient. Programs are compiled and run; times are made up."""
    layer = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, AXIS),
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(AXIS), P(None, AXIS)),
        out_specs=P(None, AXIS),
    )
    gradients = jax.jit(jax.grad(lambda *args: layer(*args).sum(), (0, 1)))
    arguments = [jax.ShapeDtypeStruct(shape, FLOAT32) for shape in ((8, 4), (4, 6))]
    before = explain(gradients)(*arguments).decisions
    assert [d.implementation for d in before] == ["xla", "xla"]

    monkeypatch.setattr(tuning, "measure", ring_is_fastest)
    table = tune(gradients, *arguments, implementations=["ring"])
    assert set(table.entries) == {d.site.flat for d in before}
    assert read(cache).entries.keys() == table.entries.keys()
    for entry in table.entries.values():
        assert set(entry.seconds) == {"xla", "ring", COMPUTE_ONLY}
        assert entry.run.jax == jax.__version__

    after = explain(gradients)(*arguments).decisions
    assert [d.implementation for d in after] == ["ring", "ring"]
    assert all(d.reason.startswith("measured (your table): ") for d in after)
    assert [d.site.direction for d in after] == ["forward", "backward"]


def test_times_are_of_one_repetition_and_what_fails_is_told() -> None:
    site = Site("all_gather_matmul", (((2, 4), (4, 3)),), FLOAT32, "", 2)
    (trial,) = trials([site], jax.devices(), ["xla", "ring"])
    measured: list[tuple[int, list[str]]] = []

    def measure(candidates: Mapping, *, groups: int) -> dict[str, Timing]:
        measured.append((groups, list(candidates)))
        jax.block_until_ready([run() for run in candidates.values()])
        return {n: Timing(({"xla": 16.0, "ring": 32.0, COMPUTE_ONLY: 8.0}[n],)) for n in candidates}

    trial._compiling["ring_direct"] = trial._compiling["xla"].__class__()
    trial._compiling["ring_direct"].set_exception(RuntimeError("out of memory\nand more"))
    seconds = trial.seconds(measure, 5)
    assert seconds == {"xla": 1.0, "ring": 2.0, COMPUTE_ONLY: 0.5}
    # A ring that takes twice as long needs no further group.
    assert measured == [(1, ["xla", "ring", COMPUTE_ONLY]), (5, ["xla", COMPUTE_ONLY])]
    assert trial.failures == {"ring_direct": "RuntimeError: out of memory"}


def test_arrays_of_one_trial_differ_and_those_of_one_shape_share_a_program() -> None:
    site = Site("all_gather_matmul", (((2, 4), (4, 3)), ((2, 4), (4, 3))), FLOAT32, "", 2)
    (trial,) = trials([site], jax.devices(), ["xla"])
    arrays = jax.tree.leaves(trial._fill())
    assert len({float(array.ravel()[0]) for array in arrays}) == len(arrays) > 16
    assert set(trial._fillers) == set(jax.tree.leaves(trial._described))
    assert len(trial._fillers) == 3  # A shard of x, x gathered, and a weight.


def test_few_sites_are_compiled_before_the_first_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(trying, "Trial", lambda site, *_: made.append(site) or site)
    monkeypatch.setattr(trying.os, "cpu_count", lambda: 4)
    sites: Any = range(16)
    before = [len(made) for _ in trials(sites, [], ["xla", "ring"])]
    assert before == 2 * [2] + 4 * [6] + 4 * [10] + 4 * [14] + 2 * [16]
    assert made == [*sites]


@pytest.mark.needs("fused")
def test_what_cannot_carry_out_a_site_is_not_compiled() -> None:
    site = Site("matmul_all_reduce", (((3, 4), (4, 2)),), FLOAT32, "", 2)
    (trial,) = trials([site], jax.devices(), ["xla", "ring", "fused"])
    assert set(trial._compiling) == {"xla", COMPUTE_ONLY}
    assert trial.failures == {
        "ring": "3 rows are not divisible by axis '' of size 2",
        "fused": "these kernels run on Hopper GPUs only",
    }


@dataclass
class Result:
    """A trial without its programs."""

    site: Site
    times: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)

    def seconds(self, measure, groups: int) -> dict[str, float]:
        return self.times


@dataclass
class Bench:
    """Stands for the devices: what was tried on them, and what comes out."""

    tried: list[Site] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=lambda: {"xla": 2e-6, "ring": 1e-6})
    failures: dict[str, str] = field(default_factory=dict)

    def trials(self, sites, devices, implementations) -> Iterator[Result]:
        for site in sites:
            self.tried.append(site)
            known = [name for name in implementations if name in site.backends]
            times = {**{name: 3e-6 for name in (*known, COMPUTE_ONLY)}, **self.times}
            kept = {name: t for name, t in times.items() if name not in self.failures}
            yield Result(site, kept, self.failures)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setattr(tuning, "trials", bench.trials)
    return bench


SITES = [site_of("all_gather_matmul", rows, 8, 8, devices=2) for rows in (8, 16, 32)]
FLAT = [site.flat for site in SITES]


def test_sites_that_are_the_same_or_have_nothing_to_measure_are_tried_once_or_never(
    cache: Path, bench: Bench
) -> None:
    alone = site_of("all_gather_matmul", 8, 8, 8, devices=1)
    empty = site_of("all_gather_matmul", 0, 8, 8, devices=2)
    einsum = dataclasses.replace(SITES[2], einsum=Einsum("sd,sf->df", ((8, 8), (8, 8)), True))
    tune([*SITES[:2], SITES[0], FLAT[0], alone, empty, einsum])
    assert bench.tried == FLAT[:2]


def test_what_a_table_cannot_have_is_left_out_and_named(
    cache: Path, bench: Bench, capsys: pytest.CaptureFixture
) -> None:
    einsum = dataclasses.replace(SITES[1], einsum=Einsum("sd,sf->df", ((8, 8), (8, 8)), True))
    sharded = dataclasses.replace(SITES[2], weight_shards=WeightShards("fsdp", 2, 0))
    table = tune([SITES[0], einsum, sharded])
    assert bench.tried == FLAT[:1]
    assert set(table.entries) == set(FLAT[:1])
    lines = [line.split("] ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [
        f"left out, the cost model decides about it: {site.flat}" for site in (einsum, sharded)
    ]


@pytest.mark.needs("fused")
def test_what_the_table_has_is_not_measured_again_unless_asked_to(
    cache: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(SITES[:1], implementations=["ring"])
    tune(SITES[:2], implementations=["ring"])
    assert bench.tried == FLAT[:2]
    tune(SITES[:1], implementations=["ring", "ring_direct"])  # That one was not measured.
    tune(SITES[:1], again=True)
    assert bench.tried == [*FLAT[:2], FLAT[0], FLAT[0]]
    tune(SITES[:1], implementations=["ring", "fused"])  # That cannot be.
    assert len(bench.tried) == 4
    assert set(read(cache).entries) == set(FLAT[:2])
    monkeypatch.setattr(jax, "__version__", "9.9.9")
    tune(SITES[:1])
    assert len(bench.tried) == 5
    assert {entry.run.jax for entry in read(cache).entries.values()} == {"9.9.9", JAX_VERSION}


@pytest.mark.needs("fused")
def test_what_was_not_possible_and_now_is_is_measured(
    cache: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.failures["fused"] = "these kernels run on Hopper GPUs only"
    for possible in (False, False, True):
        if possible:
            monkeypatch.setattr(tuning, "unsupported_reason", lambda site, name: None)
        tune(SITES[:1])
    assert bench.tried == FLAT[:1] * 2


def test_all_implementations_are_measured_unless_some_are_named(cache: Path, bench: Bench) -> None:
    table = tune(SITES[:1])
    assert set(table.entries[FLAT[0]].seconds) == {*BACKENDS, COMPUTE_ONLY}
    table = tune(SITES[1:2], implementations=["ring"])
    assert set(table.entries[FLAT[1]].seconds) == {"xla", "ring", COMPUTE_ONLY}


def test_a_table_elsewhere_leaves_the_users_alone(
    cache: Path, bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "table.jsonl"
    table = tune(SITES, path=path)
    assert read(path).entries.keys() == table.entries.keys() == set(FLAT)
    assert not cache.exists()


def test_out_of_time_what_was_measured_is_kept(
    cache: Path, bench: Bench, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(tuning.time, "monotonic", lambda: float(next(clock)))
    tune(SITES, limit_seconds=1)
    assert bench.tried == FLAT[:1]
    assert set(read(cache).entries) == set(FLAT[:1])
    assert "out of time: 2 sites are left" in capsys.readouterr().out


def test_every_site_is_saved_before_the_next(
    cache: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(sites, devices, implementations):
        yield from bench.trials(sites[:2], devices, implementations)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "trials", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(SITES)
    assert set(read(cache).entries) == set(FLAT[:2])


def test_progress_and_failures_are_printed(
    cache: Path, bench: Bench, capsys: pytest.CaptureFixture
) -> None:
    """Failures are printed once, as most of what is left out is left out at every site."""
    bench.failures["ring_direct"] = "RuntimeError: no"
    table = tune(SITES[:2])
    first, failure, *sites = capsys.readouterr().out.splitlines()
    assert first.endswith(f"2 of 2 sites to measure; the table is {cache}")
    assert failure.endswith("] ring_direct is left out: RuntimeError: no (reported once)")
    assert len(sites) == 2
    for line, site in zip(sites, FLAT, strict=False):
        assert f"{site}: xla 2, ring 1" in line
    assert "ring_direct" not in table.entries[FLAT[0]].seconds


def test_a_site_without_its_reference_is_not_saved(cache: Path, bench: Bench) -> None:
    bench.failures["xla"] = "RuntimeError: out of memory"
    assert tune(SITES[:1]).entries == {}


@pytest.mark.parametrize("compiled", ["overlap_jit", "overlap_jit of overlap", "jit"])
def test_functions_are_tuned_as_users_have_them(
    compiled: str, cache: Path, bench: Bench, make_mesh: MeshFactory
) -> None:
    """With static arguments; and with an nnx model, which keeps its state."""

    def step(name: str, model: nnx.Module, x: Any, count: nnx.Variable) -> Any:
        assert name == "twice"
        count[...] += 1
        return 2 * model(x)

    if compiled == "jit":
        fun: Any = jax.jit(functools.partial(step, "twice"))
    else:
        fun = overlap_jit(overlap(step) if "of" in compiled else step, static_argnums=0)
    layer = ColumnParallelLinear(4, 6, rngs=nnx.Rngs(0), mesh=make_mesh({AXIS: 2}))
    count = nnx.Variable(np.zeros((), np.int32))
    arguments = layer, np.ones((8, 4), np.float32), count
    arguments = arguments if compiled == "jit" else ("twice", *arguments)
    assert len(tune(fun, *arguments).entries) == 1
    assert bench.tried == [decision.site.flat for decision in explain(fun)(*arguments).decisions]
    assert count[...] == 0


def test_what_overlap_would_replace_is_no_site_before(
    cache: Path, bench: Bench, make_mesh: MeshFactory
) -> None:
    """The sentence says what to write, and that works."""
    block, arguments = plain(make_mesh({AXIS: 2})), flat_arguments()
    for fun in (block, overlap_jit(block)):
        with pytest.raises(ValueError, match=r"give what replaces .*: collective_matmul.overlap"):
            tune(fun, *arguments)
    tune(overlap(block), *arguments)
    assert [site.op for site in bench.tried] == ["all_gather_matmul", "matmul_reduce_scatter"]


def test_what_cannot_be_tuned_is_refused(cache: Path, bench: Bench) -> None:
    for message, call in {
        "^target=<function .*>: calls no collective matmul; give": lambda: tune(lambda x: x, 1.0),
        "^args: 1 beside sites; expected none": lambda: tune(SITES, 1.0),
        "^target: has the function <.*>; expected .*; tune functions one by": lambda: tune(
            cast("Any", [max])
        ),
        r"^target: has a str; expected .*explain\(f\)\(\*args\)": lambda: tune(cast("Any", "8B")),
        "^target: a int; expected a function, with its arguments after": lambda: tune(
            cast("Any", 8)
        ),
        "^implementations: 'fast' is unknown; expected some of xla, ": lambda: tune(
            SITES, implementations=["fast"]
        ),
        r"^devices: of kinds \[\]; expected at least one": lambda: tune(SITES, devices=[]),
        r"^devices=\[AbstractDevice.*: expected devices .*; run this on the GPUs": lambda: tune(
            SITES, devices=[H200] * 2
        ),
        r"^devices=AbstractMesh.*: expected devices to measure on": lambda: tune(
            SITES, devices=cast("Any", AbstractMesh((2,), (AXIS,), abstract_device=H200))
        ),
        "^devices: 1, .* needs 2; give more, .*--devices.*device_count=2 simulates 2": lambda: tune(
            SITES, devices=jax.devices()[:1]
        ),
        "^groups=0: expected at least 1": lambda: tune(SITES, groups=0),
        "^limit_seconds=0: expected more than 0": lambda: tune(SITES, limit_seconds=0),
        "^seconds_per_group=-1: expected more than 0": lambda: tune(SITES, seconds_per_group=-1),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(
        TypeError, match=r"^args: 0: .*'x'; give .* <lambda>\(x\) one by one: tune\("
    ):
        tune(lambda x: x)
    assert bench.tried == []
    assert not cache.exists()


def test_times_of_a_cpu_do_not_decide_about_later_programs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("COLLECTIVE_MATMUL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    sentence = (
        "^devices: no GPUs to measure on, only cpu, .*; run this on the GPUs, or, .* a path of"
    )
    with pytest.raises(ValueError, match=sentence):
        tune(SITES[:1])
    assert bench.tried == [] and not (tmp_path / "home").exists()
    assert tune(SITES[:1], path=tmp_path / "own.jsonl").entries


def test_the_command_without_gpus_asks_for_its_output(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("COLLECTIVE_MATMUL_CACHE_DIR")
    with pytest.raises(SystemExit):
        command.main(["tune", "--without-gpus", "--shapes", "debug"])
    error = capsys.readouterr().err
    assert "devices: no GPUs to measure on, only cpu" in error and "add --output FILE" in error
    assert bench.tried == []


def test_devices_that_a_mesh_describes_are_not_here_to_be_measured(
    cache: Path, bench: Bench, tmp_path: Path
) -> None:
    """The sentence says where their table is read, which is so."""
    mesh = AbstractMesh((2,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    block, arguments = overlap(plain(mesh)), flat_arguments(4096, 4096, 4096, dtype=BFLOAT16)
    expected = cache.with_name("h200.jsonl")
    sentence = (
        f"^target: its mesh describes NVIDIA H200, and there are none to measure on, only cpu; run"
        f" tune where they are, and copy the table that it saves there to {expected} here, "
    )
    for path in (None, tmp_path / "own.jsonl"):
        with pytest.raises(ValueError, match=sentence):
            tune(block, *arguments, path=path)
    assert bench.tried == [] and not (tmp_path / "own.jsonl").exists()
    sites = [decision.site.flat for decision in explain(block)(*arguments).decisions]
    run = Run("2026-11-28", JAX_VERSION, "2 × NVIDIA H200")
    save(expected, "NVIDIA H200", {site: Entry({"xla": 2e-6, "ring": 1e-6}, run) for site in sites})
    decisions = explain(block)(*arguments).decisions
    assert all("measured (your table)" in decision.reason for decision in decisions)


def test_several_processes_measure_sites_of_all_devices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "device_count", lambda: 16)
    with pytest.raises(ValueError, match=r"^tune: 2 processes with 16 devices, and .* is of 2; "):
        tune(SITES)


def test_what_fails_in_one_process_runs_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site("all_gather_matmul", (((2, 4), (4, 3)),), FLOAT32, "", 2)
    (trial,) = trials([site], jax.devices(), ["xla", "ring", "ring_direct"])
    told = iter([{"ring": "out of memory"}, {"ring_direct": "lost"}])
    monkeypatch.setattr(trying, "exchange", lambda own: [own, next(told)])
    assert set(trial.seconds(ring_is_fastest, 1)) == {"xla", COMPUTE_ONLY}
    assert trial.failures == {
        "ring": "process 1: out of memory",
        "ring_direct": "process 1: lost",
    }


def test_devices_say_what_they_were(cache: Path, bench: Bench) -> None:
    (entry,) = tune(SITES[:1], devices=jax.devices()[:3]).entries.values()
    assert entry.run.devices == f"3 × {jax.devices()[0].device_kind}"


def test_the_clocks_of_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        device_kind, platform = "NVIDIA H200", "gpu"

    output = "1980 MHz, 3201 MHz, 700.00 W, 580.1\n" * 4
    finished = tuning.subprocess.CompletedProcess([], 0, stdout=output)
    monkeypatch.setattr(tuning.subprocess, "run", lambda *args, **keywords: finished)
    expected = "4 × NVIDIA H200, up to 1980 MHz (memory 3201 MHz) and 700.00 W, driver 580.1"
    assert tuning._describe([Gpu()] * 4).devices == expected  # type: ignore[list-item]

    def missing(*args, **keywords):
        raise FileNotFoundError

    monkeypatch.setattr(tuning.subprocess, "run", missing)
    assert tuning._describe([Gpu()]).devices == "1 × NVIDIA H200, clocks unknown"  # type: ignore


def test_the_command_measures_the_layers_of_models(
    cache: Path, bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "table.jsonl"
    arguments = f"tune --shapes debug --rows 16,32 --devices 4 --dtype float32 --output {path}"
    command.main([*arguments.split(), "--without-gpus"])
    expected = {site.flat for site in model_requests.sites(["debug"], [16, 32], 4, "float32")}
    assert read(path).entries.keys() == expected
    assert bench.tried[0].rows == 4


def test_the_command_measures_a_recipe(cache: Path, bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    arguments = f"tune --shapes tiny --rows 512 --devices 4 --fp8 tensorwise --output {path}"
    command.main([*arguments.split(), "--without-gpus"])
    expected = {site.flat for site in model_requests.sites(["tiny"], [512], 4, fp8="tensorwise")}
    assert read(path).entries.keys() == expected == set(bench.tried)
    assert {site.fp8 for site in expected} == {"tensorwise"}


def test_the_command_ends_with_a_sentence(
    cache: Path, bench: Bench, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        command.main(["tune", "--shapes", "debug"])
    assert "JAX finds no GPU, only cpu devices" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["tune", "--shapes", "llama3-9b"])  # A name is wrong on every machine.
    assert "shapes='llama3-9b': expected one of llama3-8b" in (error := capsys.readouterr().err)
    assert "did you mean llama3-8b?" in error
    with pytest.raises(SystemExit):
        command.main(["tune", "--without-gpus", "--shapes", "gpt"])
    assert "shapes='gpt': expected one of llama3-8b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["tune", "--without-gpus", "--fp8", "int8"])
    assert "--fp8: invalid choice: 'int8'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["tune", "--without-gpus", "--shapes", "debug", "--devices", "1"])
    simulated = "XLA_FLAGS=--xla_force_host_platform_device_count=4"
    assert "devices=1: expected at least 2" in (error := capsys.readouterr().err)
    assert "--devices" in error and simulated in error
