"""Settings of every test: which devices there are, how strict JAX is, how hard Hypothesis tries.

Give jitted functions NumPy arrays: their shards are cut on the host, while each new shape of a
`jax.Array` on one device costs a compilation to spread it over the mesh.
"""

from __future__ import annotations

import ast
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Threads of OpenBLAS spin while they wait for each other's part of a product: on the small matrices
# of tests they take several times the CPU seconds of one thread. It is read when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import jax
import pytest
from jax.sharding import AxisType, Mesh

import collective_matmul

MeshFactory = Callable[[dict[str, int]], Mesh]

#: Backends and formats that some tests name, and where they are. Without one of them and its own
#: tests, the other tests pass; those about it are marked `needs`.
REMOVABLE = {
    "blockwise": "operands/recipes/blockwise.py",
    "fused": "ops/matmul/fused",
    "one_shot": "ops/matmul/one_shot",
}
LIBRARY = Path(collective_matmul.__file__).parent

SIMULATED_DEVICES = 8
ON_THE_CPU = {
    "jax_platforms": "cpu",
    # Compiling takes most of the suite's time. This skips LLVM's optimizations, not XLA's: the
    # optimized HLO is the same, and a ring with its gradients compiles in two thirds of the time.
    "jax_disable_most_optimizations": True,
}
# With one LLVM module per program, and without an MLIR pipeline per fusion, a ring with its
# gradients compiles in less than half of the time. Later versions of XLA have no other emitter.
XLA_FLAGS = (
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
    if jax.__version_info__ < (0, 11)
    else ""
)

# No deadline: an example may be compiled, while the next one only runs.
_PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("short", _PATIENT, max_examples=10)
# The same examples on every run, so that a change alone can turn the suite red.
hypothesis.settings.register_profile(
    "exhaustive", _PATIENT, max_examples=25, derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="with -m gpu: run the tests for GPUs on simulated devices, at small sizes",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the devices before JAX first looks for them: GPUs under `-m gpu`, else the CPU.

    Where exhaustive tests are selected, Hypothesis searches longer too.
    """
    marker_expression = config.option.markexpr
    wants_gpus = "gpu" in marker_expression and "not gpu" not in marker_expression
    if not wants_gpus and "not exhaustive" not in marker_expression:
        hypothesis.settings.load_profile("exhaustive")
    if wants_gpus and not config.option.rehearse:
        # The CPU too, for what a test compares with.
        jax.config.update("jax_platforms", "cuda,cpu")
    else:
        for name, value in ON_THE_CPU.items():
            jax.config.update(name, value)
            # A trainer that a test starts must round as this process does.
            os.environ[name.upper()] = str(value)
        os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
        jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
    jax.config.update("jax_numpy_rank_promotion", "raise")


if sys.version_info < (3, 11, 8):
    # There, an `ast.parse` inside another raises SystemError (CPython's gh-106905). The inner one
    # may be the traceback of a failed finalizer, such as those of orbax that pyproject.toml lists,
    # when garbage is collected while tyro reads the trainer's classes.
    _parse = ast.parse

    def _parse_without_collecting(*arguments: Any, **keywords: Any) -> ast.AST:
        gc.disable()
        try:
            return _parse(*arguments, **keywords)
        finally:
            gc.enable()

    ast.parse = _parse_without_collecting


def pytest_collection_finish() -> None:
    """Exempts what is alive now, and stays so, from being searched for garbage again and again.

    Tracing makes millions of objects, few of them in cycles. With Python's thresholds the collector
    takes a tenth of the suite's time.
    """
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a part that was taken out. Fails a GPU test that finds no GPU.

    If that was skipped too, it would look as if it had been checked.
    """
    for name in (name for marker in item.iter_markers("needs") for name in marker.args):
        if not (LIBRARY / REMOVABLE[name]).exists():
            pytest.skip(f"needs {name!r}, which is not here")
    rehearsed = item.config.option.rehearse
    if item.get_closest_marker("gpu") and not rehearsed and jax.default_backend() != "gpu":
        pytest.fail("needs an NVIDIA GPU, and jax finds none: run it where there is one")


@pytest.fixture(scope="module")
def strict_dtype_promotion() -> Iterator[None]:
    """Forbids implicit casts, as users can: mixing bfloat16 and float32 raises."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session", autouse=True)
def no_tables_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hides what this machine's user has tuned, so that it decides nothing in tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path_factory.mktemp("tables")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    """A program that several tests or processes compile is compiled once.

    Each pytest worker has a folder of its own, since JAX does not write entries atomically. A
    folder that the environment names is kept: `JAX_COMPILATION_CACHE_DIR` speeds up repeated runs.
    """
    if jax.default_backend() != "cpu":
        return  # Programs for GPUs may hold addresses of peers.
    if request.config.option.rehearse:
        return  # The threads that compile for these tests would write one entry at the same time.
    kept = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    folder = os.path.join(kept, worker) if kept else str(tmp_path_factory.mktemp("compiled"))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_report_header() -> str:
    return f"jax {jax.__version__}"


@pytest.fixture(scope="session")
def make_mesh() -> MeshFactory:
    """A mesh over the first devices, by the sizes of its axes: `make_mesh({"tensor": 4})`.

    Its axes are Auto. On GPUs, a test that asks for more than there are is skipped.
    """
    return lambda sizes: _mesh(tuple(sizes.items()))


def skip_without(needed: int) -> None:
    """Skips a test that needs more devices than there are."""
    if needed > len(jax.devices()):
        pytest.skip(f"needs {needed} devices, and there are {len(jax.devices())}")


@cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    names, sizes = zip(*axes, strict=True)
    devices, needed = jax.devices(), math.prod(sizes)
    if jax.default_backend() == "gpu":
        skip_without(needed)
    return jax.make_mesh(
        sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices[:needed]
    )
