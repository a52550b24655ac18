"""A new backend is one class and one registration: all else follows from its answers.

One toy inherits the reference, as docs/contributing/add_a_backend.md advises, and gathers in two
halves. Another one executes requests by itself, and refuses an op. Nothing of the library is
changed here but by `register`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    all_gather_matmul,
    collective_einsum,
    explain,
    matmul_all_reduce,
    matmul_reduce_scatter,
    tune,
)
from collective_matmul.dispatch.contract import Prediction
from collective_matmul.dispatch.recording import record_decisions
from collective_matmul.dispatch.selection import choose
from collective_matmul.dispatch.tables.table_files import cache_path, save
from collective_matmul.hardware import rates
from collective_matmul.operands.multiply import matmul, multiplied
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.backends import BACKENDS, register, unregister
from collective_matmul.ops.matmul.request import Site
from collective_matmul.ops.matmul.xla import Xla, xla_seconds
from tests.conftest import MeshFactory
from tests.dispatch.sites import H200, site_of, tracing_for
from tests.dispatch.tables.example_tables import entry, measure_as

NAME = "two_halves"


class TwoHalves(Xla):
    """XLA's matmuls and sums; two all-gathers of half the rows take the place of one."""

    name = NAME
    # `Xla` executes them all. Here, the dimension to be halved must be one of rows.
    executes_einsums = False

    def all_gather(self, x: jax.Array, axis_name: str, dimension: int) -> jax.Array:
        """[..., m, ...] -> [..., D*m, ...]."""
        halves = jnp.split(x, 2, axis=dimension)
        # [..., D, m/2, ...] each
        gathered = [lax.all_gather(half, axis_name, axis=dimension) for half in halves]
        joined = jnp.concatenate(gathered, axis=dimension + 1)
        return joined.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])

    def unsupported_reason(self, site: Site) -> str | None:
        """A phrase about the dimension to be halved; None if it is even, or nothing is gathered."""
        if site.dimension is None:
            return None
        gathers = site.op == "all_gather_matmul"
        shape = site.operands[0][0] if gathers else site.co_gathered
        if shape is None or shape[site.dimension] % 2 == 0:
            return None
        return f"a shard has {shape[site.dimension]} rows, which cannot be halved"

    def predict(self, site: Site) -> Prediction | None:
        """Half the time of `Xla` in gathers, to be chosen there; none elsewhere."""
        gpu = rates()
        if gpu is None or site.op != "all_gather_matmul":
            return None
        return Prediction(xla_seconds(site) / 2, 0.15, "a toy's model")


class Padded(MatmulBackend):
    """Gathers by a sum of padded shards, and does not scatter."""

    name = "padded"
    predicts_precisely = False

    def all_gather_matmul(self, request: Site, x: Any, ws: Any) -> Any:
        dimension, axis_name = request.shard_dimension, request.axis_name
        devices, device = lax.axis_size(axis_name), lax.axis_index(axis_name)

        def gather(array: jax.Array) -> jax.Array:
            shape = list(array.shape)
            shape[dimension] *= devices
            start = device * array.shape[dimension]
            empty = lax.full(shape, 0, array.dtype)
            padded = lax.dynamic_update_slice_in_dim(empty, array, start, dimension)
            return lax.psum(padded, axis_name)

        whole = jax.tree.map(gather, x)
        ys = tuple(matmul(multiplied(whole), w, request.transpose_w) for w in ws)
        return ys, whole if request.keep_gathered else None

    def matmul_reduce_scatter(
        self, request: Site, xs: Any, ws: Any, co_gathered: Any = None
    ) -> Any:
        raise AssertionError("unsupported_reason says that it cannot")

    def matmul_all_reduce(self, request: Site, xs: Any, ws: Any) -> jax.Array:
        raise AssertionError("unsupported_reason says that it cannot")

    def unsupported_reason(self, site: Site) -> str | None:
        return None if site.op == "all_gather_matmul" else "toys do not scatter"

    def predict(self, site: Site) -> Prediction | None:
        reference = BACKENDS["xla"].predict(site)
        return reference and Prediction(reference.seconds / 2, 0.5, "a toy's hope")


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLLECTIVE_MATMUL_CACHE_DIR", str(tmp_path))
    for backend in (TwoHalves(), Padded()):
        register(backend)
    yield
    for backend in (NAME, "padded"):
        unregister(backend)


M, K, N = 16, 8, 8


def gather(mesh: Mesh | AbstractMesh, **options: Any) -> Any:
    return jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tensor", **options),
        mesh=mesh,
        in_specs=(P("tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
    )


def scatter(mesh: Mesh | AbstractMesh, **options: Any) -> Any:
    return jax.shard_map(
        lambda x, w: matmul_reduce_scatter(x, w, "tensor", **options),
        mesh=mesh,
        in_specs=(P(None, "tensor"), P("tensor")),
        out_specs=P("tensor"),
    )


def all_reduce(mesh: Mesh | AbstractMesh, **options: Any) -> Any:
    return jax.shard_map(
        lambda x, w: matmul_all_reduce(x, w, "tensor", **options),
        mesh=mesh,
        in_specs=(P(None, "tensor"), P("tensor")),
        out_specs=P(),
    )


OPS = {"gather": gather, "scatter": scatter, "all_reduce": all_reduce}


def random_arrays(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(0)
    return tuple(generator.normal(size=shape).astype(np.float32) for shape in shapes)


def value_and_gradients(op: Any) -> Any:
    """(x, w, c) -> y, and the gradients of ``sum(c * y)``."""

    def loss(x: Any, w: Any, c: Any) -> Any:
        y = op(x, w)
        return jnp.sum(c * y), y

    def results(x: Any, w: Any, c: Any) -> Any:
        gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w, c)
        return y, *gradients

    return results


def expected(x: Any, w: Any, c: Any) -> tuple[np.ndarray, ...]:
    x, w, c = (np.asarray(array, np.float64) for array in (x, w, c))
    return x @ w, c @ w.T, x.T @ c


def described(*shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def decisions(fun: Any, *args: Any) -> list[tuple[str, str, str]]:
    explained = explain(fun)(*args).decisions
    return [(d.site.direction, d.implementation, d.reason) for d in explained]


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_values_and_gradients_are_those_of_float64(devices: int, make_mesh: MeshFactory) -> None:
    mesh, arrays = make_mesh({"tensor": devices}), random_arrays((M, K), (K, N), (M, N))

    @jax.jit
    def of_all(*arrays: Any) -> Any:
        return [value_and_gradients(op(mesh, implementation=NAME))(*arrays) for op in OPS.values()]

    for results in of_all(*arrays):
        for result, reference in zip(results, expected(*arrays), strict=True):
            # float32 sums of at most 16 products of numbers near 1.
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-5)


def test_other_dimensions_are_gathered_in_halves(make_mesh: MeshFactory) -> None:
    x, w = random_arrays((2, M, K), (K, N))
    op = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tensor", gather_dimension=1, implementation=NAME),
        mesh=make_mesh({"tensor": 4}),
        in_specs=(P(None, "tensor"), P(None, "tensor")),
        out_specs=P(None, None, "tensor"),
    )
    assert str(jax.make_jaxpr(op)(x, w)).count("all_gather[") == 2
    np.testing.assert_allclose(jax.jit(op)(x, w), x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise", "blockwise"])
def test_operands_in_8_bits_are_as_exact_as_with_xla(fp8: str, make_mesh: MeshFactory) -> None:
    mesh, arrays = make_mesh({"tensor": 2}), random_arrays((M, K), (K, N), (M, N))

    @jax.jit
    def of_both(*arrays: Any) -> Any:
        return [
            [value_and_gradients(op(mesh, implementation=name, fp8=fp8))(*arrays) for op in ops]
            for name in (NAME, "xla")
        ]

    ops = gather, scatter
    halves, xla = of_both(*arrays)
    jax.tree.map(np.testing.assert_array_equal, halves, xla)
    for results in halves:
        for result, reference in zip(results, expected(*arrays), strict=True):
            # Three bits of mantissa, two in the gradients of "tensorwise".
            error = np.linalg.norm(result - reference) / np.linalg.norm(reference)
            assert error < 0.1


@pytest.mark.parametrize("weight_dimension", [0, 1])
@pytest.mark.parametrize("fp8", [None, "rowwise"])
def test_sharded_weights(fp8: str | None, weight_dimension: int, make_mesh: MeshFactory) -> None:
    mesh = make_mesh({"data": 2, "tensor": 2})
    x, w, c = random_arrays((M, K), (K, N), (M, N))
    spec = P("data", "tensor") if weight_dimension == 0 else P(None, ("tensor", "data"))
    op = jax.shard_map(
        lambda x, w: all_gather_matmul(
            x,
            w,
            "tensor",
            fp8=fp8,
            weight_axis_name="data",
            weight_dimension=weight_dimension,
            implementation=NAME,
        ),
        mesh=mesh,
        in_specs=(P(("data", "tensor")), spec),
        out_specs=P("data", "tensor"),
    )
    results = jax.jit(value_and_gradients(op))(x, w, c)
    for result, reference in zip(results, expected(x, w, c), strict=True):
        error = np.linalg.norm(result - reference) / np.linalg.norm(reference)
        # Three bits of mantissa; or float32.
        assert error < (0.1 if fp8 else 1e-6)
    chosen = decisions(value_and_gradients(op), x, w, c)
    assert {entry[:2] for entry in chosen} == {("forward", NAME), ("backward", NAME)}


def test_a_name_or_the_first_possible_of_a_sequence_is_requested(make_mesh: MeshFactory) -> None:
    mesh, shapes = make_mesh({"tensor": 4}), described((M, K), (K, N))
    for names, chosen in ((NAME, NAME), ((NAME, "xla"), NAME), (("fused", NAME), NAME)):
        [(_, name, reason)] = decisions(gather(mesh, implementation=names), *shapes)
        assert name == chosen
        assert "requested" in reason


def test_odd_rows_are_refused_with_the_reason(
    make_mesh: MeshFactory, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, shapes = make_mesh({"tensor": 4}), described((12, K), (K, N))
    reason = "a shard has 3 rows, which cannot be halved"
    with pytest.raises(ValueError, match=f"'{NAME}': {reason}; for "):
        jax.eval_shape(gather(mesh, implementation=NAME), *shapes)
    with caplog.at_level(logging.WARNING, logger="collective_matmul"):
        [(_, chosen, why)] = decisions(gather(mesh, implementation=(NAME, "ring")), *shapes)
    assert chosen == "ring"
    assert reason in why
    assert reason in caplog.text


def test_einsums_that_are_no_matmuls_are_refused(make_mesh: MeshFactory) -> None:
    op = jax.shard_map(
        lambda x, w: collective_einsum(
            "ks,kn->sn", x, w, "tensor", gather="s", implementation=NAME
        ),
        mesh=make_mesh({"tensor": 4}),
        in_specs=(P(None, "tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
    )
    with pytest.raises(ValueError, match=f"'ks,kn->sn' is not a matmul, and {NAME} executes"):
        jax.eval_shape(op, *described((K, M), (K, N)))


def test_the_backward_pass_is_refused_too(make_mesh: MeshFactory) -> None:
    """Results of a reduce-scatter have 3 rows on each device, which its gradient gathers."""
    mesh, shapes = make_mesh({"tensor": 4}), described((12, K), (K, N), (12, N))
    op = scatter(mesh, implementation=NAME)
    jax.eval_shape(op, *shapes[:2])
    with pytest.raises(ValueError, match="3 rows, which cannot be halved"):
        jax.eval_shape(value_and_gradients(op), *shapes)


def test_a_saved_table_chooses_it(make_mesh: MeshFactory) -> None:
    mesh, shapes = make_mesh({"tensor": 4}), described((M, K), (K, N))
    [decision] = explain(gather(mesh))(*shapes).decisions
    assert decision.implementation == "xla"
    kind = mesh.devices.flat[0].device_kind
    path = cache_path(kind)
    assert path is not None
    save(path, kind, {decision.site.flat: entry(xla=3, two_halves=2)})
    [decision] = explain(gather(mesh))(*shapes).decisions
    assert decision.implementation == NAME
    assert "measured" in decision.reason
    assert (decision.seconds, decision.reference_seconds) == (2e-6, 3e-6)


def test_its_prediction_chooses_it_where_it_has_one() -> None:
    mesh = AbstractMesh((3,), ("tensor",), (AxisType.Auto,), abstract_device=H200)
    shapes = described((6144, 4096), (4096, 3072), dtype="bfloat16")
    [decision] = explain(gather(mesh), peer_kernels=False)(*shapes).decisions
    assert decision.implementation == NAME
    assert "a toy's model" in decision.reason
    shapes = described((6144, 6144), (6144, 4096), dtype="bfloat16")
    [decision] = explain(scatter(mesh), peer_kernels=False)(*shapes).decisions
    assert decision.implementation != NAME


def test_explain_has_a_line_for_each_pass(make_mesh: MeshFactory) -> None:
    op = value_and_gradients(gather(make_mesh({"tensor": 4}), implementation=NAME))
    table = explain(op)(*described((M, K), (K, N), (M, N))).table(400)
    lines = [line for line in table.splitlines() if f" {NAME} " in line]
    assert ["forward" in line for line in lines] == [True, False]
    assert ["backward" in line for line in lines] == [False, True]
    assert all(Path(__file__).name in line for line in lines)


def test_tune_measures_it(make_mesh: MeshFactory) -> None:
    mesh, shapes = make_mesh({"tensor": 2}), described((M, K), (K, N))
    table = tune(
        gather(mesh),
        *shapes,
        devices=jax.devices()[:2],
        implementations=[NAME],
        groups=1,
        seconds_per_group=1e-4,
    )
    [measured] = table.entries.values()
    assert set(measured.seconds) == {"xla", NAME, "compute_only"}
    [(_, _, reason)] = decisions(gather(mesh), *shapes)
    assert "measured" in reason


def test_it_leaves_nothing_behind(make_mesh: MeshFactory) -> None:
    unregister(NAME)
    try:
        assert NAME not in BACKENDS
        op = gather(make_mesh({"tensor": 2}), implementation=NAME)
        with pytest.raises(ValueError, match=f"^implementation='{NAME}': expected None"):
            jax.eval_shape(op, *described((M, K), (K, N)))
    finally:
        register(TwoHalves())


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"^backend.name='{NAME}': it is taken"):
        register(TwoHalves())


def test_a_backend_may_execute_requests_by_itself(make_mesh: MeshFactory) -> None:
    x, w = random_arrays((M, K), (K, N))
    op = gather(make_mesh({"tensor": 2}), implementation="padded")
    # float32 sums of 8 products of numbers near 1.
    np.testing.assert_allclose(jax.jit(op)(x, w), x @ w, rtol=1e-5, atol=1e-5)


def test_a_backend_may_refuse_an_op(make_mesh: MeshFactory) -> None:
    mesh, shapes = make_mesh({"tensor": 2}), described((M, K), (K, N))
    with pytest.raises(ValueError, match=r"^implementation='padded': toys do not scatter; "):
        jax.eval_shape(scatter(mesh, implementation="padded"), *shapes)
    [(_, chosen, reason)] = decisions(scatter(mesh, implementation=["padded", "ring"]), *shapes)
    assert chosen == "ring"
    assert "padded is not possible: toys do not scatter" in reason


@pytest.mark.parametrize(
    ("op", "named"), [("all_gather_matmul", True), ("matmul_reduce_scatter", False)]
)
def test_an_imprecise_prediction_is_named_beside_measurements_where_it_can(
    op: Any, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_as(monkeypatch, {"xla": 2e-6, NAME: 3e-6, "ring": 3e-6})
    with tracing_for(H200), record_decisions() as taken:
        assert choose(site_of(op, 1024, 4096, 4096)).name == "xla"
    assert ("padded was not measured here" in taken[0].reason) == named
