"""The table that explains a program."""

from __future__ import annotations

import functools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from collective_matmul import (
    all_gather_matmul,
    collective_einsum,
    explain,
    matmul_reduce_scatter,
    overlap_jit,
)
from tests.conftest import MeshFactory
from tests.dispatch.sites import BFLOAT16, H200
from tests.explained import WIDE, arguments, flat_arguments, lines_of, on, plain
from tests.hopper import HAS_KERNELS
from tests.reference import AXIS


def test_equal_ops_of_one_line_are_one_line_with_a_count(make_mesh: MeshFactory) -> None:
    fun = on(make_mesh({AXIS: 2}), implementation="ring")
    gather, scatter = lines_of(fun, *arguments())
    count, where, direction, op, shapes, chosen, why = gather
    assert (count, direction, op) == ("2×", "forward", "all_gather_matmul")
    assert re.fullmatch(r".*explained\.py:\d+ in blocks", where)
    assert shapes == "float32 [4,4]@[4,6] over tensor=2"
    assert (chosen, why) == ("ring", "requested")
    assert scatter[3:5] == ["matmul_reduce_scatter", "float32 [8,6]@[6,4] over tensor=2"]


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun])
def test_gradients_have_lines_of_their_own(make_mesh: MeshFactory, jit) -> None:
    sharded = on(make_mesh({AXIS: 2}))
    gradients = jit(jax.value_and_grad(lambda *args: sharded(*args).sum(), (0, 1)))
    lines = lines_of(gradients, *arguments())
    assert [line[:1] + line[2:4] for line in lines] == [
        ["2×", "forward", "all_gather_matmul"],
        ["2×", "forward", "matmul_reduce_scatter"],
        ["2×", "backward", "all_gather_matmul"],
        ["2×", "backward", "matmul_reduce_scatter"],
    ]
    assert lines[3][4] == "float32 [8,6]@[6,4], with [4,4] over tensor=2"
    assert {line[-1] for line in lines} == {"on cpu nothing runs under a matmul"}


@pytest.mark.parametrize("requested", [False, "auto"])
def test_functions_of_overlap_jit_are_explained_as_what_they_compile(
    make_mesh: MeshFactory, requested: Any
) -> None:
    sharded = on(make_mesh({AXIS: 2}))

    def scaled(kind: str, x: Any, weights: Any, *, factor: str) -> Any:
        assert (kind, factor) == ("twice", "2")
        return int(factor) * sharded(x, weights)

    static = {"static_argnums": 0, "static_argnames": "factor"}
    jitted = overlap_jit(scaled, peer_kernels=requested, **static)
    x, weights = arguments()
    explained = explain(jitted)("twice", x, weights, factor="2")
    assert explained.decisions == explain(sharded)(x, weights).decisions
    assert (explained.peer_kernels.reason == "requested") is (requested is False)


def test_a_step_of_nnx_objects_that_overlap_jit_compiles_is_explained() -> None:
    nnx = pytest.importorskip("flax.nnx")

    @overlap_jit
    def step(model: Any, x: jax.Array) -> jax.Array:
        return model(x).sum()

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert explain(step)(model, np.ones((2, 4), np.float32)).decisions == ()


def test_what_is_compiled_already_is_explained_again(make_mesh: MeshFactory) -> None:
    fun = jax.jit(on(make_mesh({AXIS: 2})))
    x, weights = arguments()
    fun(
        np.zeros(x.shape, x.dtype),
        [tuple(np.zeros(w.shape, w.dtype) for w in ws) for ws in weights],
    )
    for _ in range(2):
        assert len(explain(fun)(x, weights).decisions) == 4


def test_another_kind_of_device_can_be_asked_about() -> None:
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    shapes = arguments(8192, 8192, 28672, dtype=BFLOAT16)
    explanation = explain(on(mesh), peer_kernels=False)(*shapes)
    assert all(decision.seconds for decision in explanation.decisions)
    table = explanation.table(WIDE)
    first, *_ = table.splitlines()[1:]
    decision = explanation.decisions[0]
    assert decision.seconds is not None
    assert decision.reference_seconds is not None
    assert f"{decision.seconds * 1e6:.0f}" in first.split()
    assert f"{decision.reference_seconds * 1e6:.0f}" in first.split()
    total, reference = (
        sum(getattr(d, name) for d in explanation.decisions)
        for name in ("seconds", "reference_seconds")
    )
    communication = sum(d.communication_seconds or 0 for d in explanation.decisions)
    hidden = sum(d.hidden_seconds for d in explanation.decisions)
    assert 0 < hidden <= communication < reference
    assert table.splitlines()[-2:] == [
        f"4 runs of collective matmuls; of 4 the times are predicted: {total * 1e3:.2f} ms,"
        f" {reference * 1e3:.2f} ms with xla ({reference / total:.2f}×)",
        f"they communicate for {communication * 1e3:.2f} ms with xla, which hides nothing; of that,"
        f" {hidden * 1e3:.2f} ms ({hidden / communication:.0%}) are hidden under matmuls, and"
        f" {(communication - hidden) * 1e3:.2f} ms are left",
    ]


def test_an_a100_has_an_estimate_of_xla_and_rings() -> None:
    """Both times are shown. A ring must win by the margin of what was never measured."""
    a100 = AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=a100)
    for rows in (256, 32768):
        shapes = arguments(rows, 8192, 28672, dtype=BFLOAT16)
        for decision in explain(on(mesh), peer_kernels=True)(*shapes).decisions:
            assert decision.implementation == "xla"
            assert re.fullmatch(
                r"estimate from the data sheet: \d+ µs xla, \d+ µs ring"
                r"(: a gain of \d\.\d% by ring is less than the 25% by which .* wrong)?",
                decision.reason,
            )


@pytest.mark.parametrize(
    ("kind", "unmeasured"), [("NVIDIA Z900", None), ("NVIDIA H100 80GB HBM3", "2")]
)
def test_shapes_that_were_never_measured_are_counted(kind: str, unmeasured: str | None) -> None:
    device = AbstractDevice(kind, num_cores=132, platform="gpu")
    mesh = AbstractMesh((8,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=device)
    shapes = arguments(8192, 8192, 28672, dtype=BFLOAT16)
    counted = re.search(
        r"^(\d) of 2 different shapes were never measured on 8 devices, and their times are a cost"
        r" model's; collective_matmul.tune measures them there, in about \d+ minutes?$",
        explain(on(mesh), peer_kernels=False)(*shapes).table(WIDE),
        re.MULTILINE,
    )
    assert (None if counted is None else counted[1]) == unmeasured


@pytest.mark.needs("fused")
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32])
def test_what_executes_sites_that_a_fused_kernel_cannot(dtype: Any) -> None:
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)
    fun = on(mesh, implementation=("fused", "xla"))
    for line in lines_of(fun, *arguments(512, 256, 4096, dtype=dtype), peer_kernels=True):
        if HAS_KERNELS and dtype == BFLOAT16:
            assert (line[5], line[-1]) == ("fused", "requested")
        else:
            why = "dtypes ['float32']" if HAS_KERNELS else f"jax {jax.__version__}"
            assert line[5] == "xla"
            assert line[-1].startswith(f"fallback: fused is not possible: {why}: ")


@pytest.mark.needs("fused")
@pytest.mark.parametrize(
    ("subscripts", "w", "dimension", "transpose_w"),
    [
        ("bsd,dhk->bshk", (256, 2, 64), 1, False),
        ("bsd,hkd->bshk", (2, 64, 256), 1, True),
        ("bsd,hdk->bshk", (2, 256, 64), 1, False),  # Transposed first, into [K, N].
        ("bsd,bdf->bsf", (2, 256, 128), None, False),
    ],
)
def test_einsums_that_are_matmuls_have_fused_kernels(
    subscripts: str, w: tuple[int, ...], dimension: int | None, transpose_w: bool
) -> None:
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,), abstract_device=H200)

    def einsum(x: jax.Array, w: jax.Array) -> jax.Array:
        return collective_einsum(
            subscripts, x, w, AXIS, gather="s", implementation=("fused", "ring")
        )

    out = P(*[AXIS if label == "s" else None for label in subscripts.partition("->")[2]])
    sharded = jax.shard_map(
        einsum, mesh=mesh, in_specs=(P(None, AXIS), P()), out_specs=out, check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in ((2, 64, 256), w)]
    (decision,) = explain(sharded, peer_kernels=True)(*shapes).decisions
    assert (decision.site.dimension, decision.site.transpose_w) == (dimension, transpose_w)
    if dimension is None:
        assert decision.implementation != "fused"
        assert "is not a matmul, and fused executes nothing else" in decision.reason
    elif HAS_KERNELS:
        assert (decision.implementation, decision.reason) == ("fused", "requested")


def test_columns_are_aligned(make_mesh: MeshFactory) -> None:
    head, first, second, _ = (
        explain(on(make_mesh({AXIS: 2})))(*arguments()).table(WIDE).splitlines()
    )
    for title, *cells in (("where", "tests"), ("pass", "forward"), ("why", "on cpu")):
        for line in (first, second):
            assert line[head.index(title) :].startswith(cells[0]) or title == "where"


def test_a_program_without_the_ops(make_mesh: MeshFactory) -> None:
    explanation = explain(lambda x: x + 1)(1.0)
    assert explanation.decisions == ()
    assert "enters no jax.shard_map" in str(explanation)
    assert "mesh axis of type Explicit" in " ".join(str(explanation).split())
    mesh = make_mesh({AXIS: 2})
    local = jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=P(), out_specs=P())
    assert str(explain(local)(1.0)) == (
        "no collective matmuls: its shard_maps call no op and neither gather nor sum"
    )


def test_ops_count_as_often_as_they_run(make_mesh: MeshFactory) -> None:
    """In loops, in calls that share a trace, where they are computed again, and side by side."""

    @jax.jit
    def shared(x, up, down):
        return matmul_reduce_scatter(jnp.sin(all_gather_matmul(x, up, AXIS)), down, AXIS)

    def body(x, up, down):
        def step(x, _):
            return jax.checkpoint(shared)(shared(x, up, down), up, down), lax.psum(x.sum(), AXIS)

        x, sums = lax.scan(step, x, None, length=5)
        return shared(x, up, down), sums

    sharded = jax.shard_map(
        body,
        mesh=make_mesh({AXIS: 2}),
        in_specs=(P(AXIS), P(None, AXIS), P(AXIS)),
        out_specs=(P(AXIS), P()),
    )

    def loss(*args):
        y, sums = sharded(*args)
        return y.sum(), sums

    gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    runs = {
        tuple(line[2:4]) if len(line) > 6 else line[2]: int(line[0][:-1])
        for line in lines_of(gradients, *flat_arguments(), verbose=True)
        if "body" not in line[1] or line[2] == "psum"
    }
    assert runs == {
        ("forward", "all_gather_matmul"): 5 * 2 + 1 + 5,  # A checkpoint computes it again.
        ("forward", "matmul_reduce_scatter"): 5 * 2 + 1,
        ("backward", "matmul_reduce_scatter"): 5 * 2 + 1,
        ("backward", "all_gather_matmul"): 5 * 2 + 1,
        "psum": 5,
    }


def test_equal_ops_side_by_side_count_each(make_mesh: MeshFactory) -> None:
    fun = on(make_mesh({AXIS: 2}))
    assert [line[0] for line in lines_of(fun, *arguments())] == ["2×", "2×"]
    looped = lambda x, weights: lax.fori_loop(0, 3, lambda i, x: fun(x, weights), x)  # noqa: E731
    assert [line[0] for line in lines_of(looped, *arguments())] == ["6×", "6×"]


def test_tables_fit_120_columns(make_mesh: MeshFactory) -> None:
    """Places, shapes and reasons get lines of their own, and are wrapped."""
    explanation = explain(plain(make_mesh({AXIS: 2})))(*flat_arguments())
    table = str(explanation)
    assert max(map(len, table.splitlines())) <= 120
    joined = " ".join(table.split())
    for line in explanation.table(WIDE).splitlines()[1:]:
        assert all(" ".join(cell.split()) in joined for cell in re.split(r"  +", line.strip()))


def permutes_of(fun: Any) -> int:
    """The number of permutes that XLA compiles, one for each ring of two devices."""
    text = jax.jit(fun).lower(*arguments()).compile().as_text()
    return len(re.findall(r" collective-permute(?:-start)?\(", text or ""))


def test_what_computes_nothing_that_is_returned_does_not_run(make_mesh: MeshFactory) -> None:
    """XLA does not execute it: here one of two ops, inside what is computed again."""
    sharded = on(make_mesh({AXIS: 2}), implementation="ring")

    def fun(x: jax.Array, weights: Any) -> jax.Array:
        sharded(2 * x, weights)
        return jax.checkpoint(sharded)(x, weights).sum()

    # The program is linear: the gradient of x needs nothing that the forward pass computes.
    for traced, gathers, scatters in (
        (fun, 2, 2),
        (jax.value_and_grad(fun), 2, 2),
        (jax.value_and_grad(fun, (0, 1)), 4, 3),
    ):
        lines = lines_of(jax.jit(traced), *arguments())
        forward = [line[0] for line in lines if line[2] == "forward"]
        assert forward == [f"{gathers}×", f"{scatters}×"]
    assert permutes_of(fun) == 2 + 2
    assert permutes_of(jax.value_and_grad(fun)) == 2 + 2 + 4


@pytest.mark.parametrize("compiled", [lambda fun: fun, jax.jit, overlap_jit, jax.grad])
def test_arguments_that_a_function_does_not_take_are_named(
    make_mesh: MeshFactory, compiled: Any
) -> None:
    sharded = on(make_mesh({AXIS: 2}))

    def loss(x: Any, weights: Any, *, scale: float = 1.0) -> jax.Array:
        return scale * sharded(x, weights).sum()

    names = r"loss\(x, weights, \*, scale=1\.0\)"
    takes = rf"; give the arguments of {names} one by one: explain\(loss\)\(\*args\)$"
    explained, args = explain(compiled(loss)), arguments()
    for message, call in {
        r"^args: 1, a tuple: missing a required argument: 'weights'": lambda: explained(args),
        r"^args: 0: missing a required argument: 'x'": lambda: explained(),
        r"^args: 3: too many positional arguments": lambda: explained(*args, 1.0),
        r"^args: 2, and scales by name: got .* 'scales'": lambda: explained(*args, scales=1.0),
    }.items():
        with pytest.raises(TypeError, match=message + takes):
            call()
    assert explained(*args).decisions
    with pytest.raises(
        TypeError, match=r"^args: 2 beside the function; .*: explain\(f\)\(\*args\)$"
    ):
        cast("Any", explain)(compiled(loss), *args)


def test_errors_of_a_function_and_arguments_that_a_decorator_adds_stay(
    make_mesh: MeshFactory,
) -> None:
    def block(mesh: Any, x: Any, weights: Any) -> Any:
        return on(mesh)(x, weights)

    @functools.wraps(block)  # Python takes the signature for that of the decorated function.
    def with_mesh(*args: Any) -> Any:
        return block(make_mesh({AXIS: 2}), *args)

    assert explain(with_mesh)(*arguments()).decisions

    def broken(x: Any) -> Any:
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        explain(broken)(1.0)


def test_shapes_that_an_auto_axis_may_divide_are_named(make_mesh: MeshFactory) -> None:
    """Over manual axes alone, an op sees the part of one device."""
    mesh = make_mesh({"data": 2, AXIS: 2})
    specs = (P("data", AXIS), P(None, AXIS)), P("data", None, AXIS)
    arguments = jnp.ones((2, 8, 16)), jnp.ones((16, 8))

    def only(axes: set[str], spec: P) -> P:
        return P(*(axis if axis in axes else None for axis in spec))

    def total(axes: set[str]) -> str:
        of_axes = functools.partial(only, axes)
        function = jax.shard_map(
            lambda x, w: all_gather_matmul(x, w, AXIS),
            mesh=mesh,
            in_specs=tuple(map(of_axes, specs[0])),
            out_specs=of_axes(specs[1]),
            axis_names=axes,
        )
        return " ".join(str(explain(function)(*arguments)).split())

    assert "shapes count all that data=2 may divide" in total({AXIS})
    assert "shapes count" not in total({"data", AXIS})
