"""`overlap_jit`: on the CPU it is `jax.jit` with the same results; what options it passes where."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from collective_matmul import OVERLAP_OPTIONS, explain, log, overlap, overlap_jit
from collective_matmul.jit import compiler
from collective_matmul.jit.xla_options import PEER_KERNEL_OPTIONS
from collective_matmul.peer_access import peer_kernels_disallowed_reason
from tests.conftest import MeshFactory
from tests.reference import AXIS, Case

PERMUTE_MODE = "xla_gpu_collective_permute_mode"


@pytest.mark.parametrize("implementation", ["xla", "ring"])
def test_results_are_those_of_jit(implementation: str, make_mesh: MeshFactory) -> None:
    case = Case("all_gather_matmul", implementation, 2, (4,), 3, ((4,),))
    x, ws, dys = case.arrays()
    fun = case.sharded(make_mesh({AXIS: 2}))

    def results_and_gradients(x, ws, dys):
        ys, transpose = jax.vjp(fun, x, ws)
        return ys, transpose(dys)

    arguments = x, tuple(ws), tuple(dys)
    expected = jax.jit(results_and_gradients)(*arguments)
    actual = overlap_jit(results_and_gradients)(*arguments)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_keywords_reach_jit() -> None:
    fun = overlap_jit(lambda x, power: x**power, static_argnames="power", donate_argnums=0)
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(fun(x, power=2), [0, 1, 4, 9])
    assert x.is_deleted()


def test_options_without_a_function_make_a_decorator() -> None:
    @overlap_jit(static_argnames="power", peer_kernels=True)
    def fun(x, power):
        return x**power

    assert fun(2.0, power=3) == 8
    assert fun._default.has_peer_kernels


def test_the_users_options_join_ours() -> None:
    fun = overlap_jit(jnp.sin, compiler_options={"xla_embed_ir_in_executable": True})
    np.testing.assert_array_equal(fun(0.0), 0.0)


@pytest.mark.parametrize("option", OVERLAP_OPTIONS)
def test_the_users_options_win(option: str) -> None:
    """XLA reads theirs, and says so when it cannot."""
    fun = overlap_jit(jnp.sin, compiler_options={option: "theirs"})
    with pytest.raises(RuntimeError, match=rf"(?s){option}.*theirs|theirs.*{option}"):
        fun(0.0)


def test_our_options_reach_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they do nothing, but XLA would refuse one that it did not know."""
    monkeypatch.setattr(compiler, "OVERLAP_OPTIONS", {"xla_gpu_overlap_everything": "1"})
    with pytest.raises(RuntimeError, match="xla_gpu_overlap_everything"):
        overlap_jit(jnp.sin)(0.0)


def test_an_unknown_option_is_xlas_error() -> None:
    fun = overlap_jit(jnp.sin, compiler_options={"xla_gpu_overlap_everything": "1"})
    with pytest.raises(RuntimeError, match="xla_gpu_overlap_everything"):
        fun(0.0)


def test_a_decorated_function_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes must be joined before JAX looks for devices, and after imports."""
    monkeypatch.setattr(
        compiler, "no_peer_access_reason", lambda: pytest.fail("looked for devices")
    )
    overlap_jit(jnp.sin)


def test_keywords_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="static_argnames"):
        overlap_jit(lambda x: x, static_argnames="y")


class Recorded:
    """A function, and for each time it is traced why kernels may not address peers' memory."""

    def __init__(self) -> None:
        self.reasons: list[str | None] = []

    def __call__(self, x: jax.Array) -> jax.Array:
        self.reasons.append(peer_kernels_disallowed_reason())
        return x


@pytest.mark.parametrize("use", ["__call__", "lower", "trace", "eval_shape"])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_traced_knows_how_it_is_compiled(use: str, fused: bool) -> None:
    recorded = Recorded()
    getattr(overlap_jit(recorded, peer_kernels=fused), use)(1.0)
    (reason,) = recorded.reasons
    assert (reason is None) == fused


def test_what_was_traced_to_be_compiled_otherwise_is_traced_again() -> None:
    recorded = Recorded()
    inner = jax.jit(recorded)
    for fused in (False, True):
        overlap_jit(lambda x: inner(x), peer_kernels=fused)(1.0)
    plain, ours = recorded.reasons
    assert "compile with collective_matmul.overlap_jit(..., peer_kernels=True)" in str(plain)
    assert ours is None


def test_options_of_fused_kernels(options: Callable) -> None:
    assert options(peer_kernels=True) == {**OVERLAP_OPTIONS, **PEER_KERNEL_OPTIONS}
    assert overlap_jit(jnp.sin, peer_kernels=True)(0.0) == 0  # XLA knows them.


@pytest.mark.parametrize("option", [*PEER_KERNEL_OPTIONS, PERMUTE_MODE])
def test_no_fused_kernels_with_other_options(option: str) -> None:
    with pytest.raises(
        ValueError,
        match=f"^compiler_options: {option}: kernels that address peers need our value;",
    ):
        overlap_jit(jnp.sin, peer_kernels=True, compiler_options={option: "CUSTOM_CALL"})
    overlap_jit(jnp.sin, compiler_options={option: "CUSTOM_CALL"})


def test_all_that_jit_offers() -> None:
    @overlap_jit
    def double(x):
        """Twice x."""
        return 2 * x

    assert double.__doc__ == "Twice x."
    assert list(inspect.signature(double).parameters) == ["x"]
    assert double.eval_shape(1.0).shape == ()
    assert double.trace(1.0).jaxpr.eqns
    assert double.lower(jnp.float32(1)).compile()(jnp.float32(1)) == 2
    assert jax.export.export(double)(jnp.float32(1)).call(jnp.float32(1)) == 2
    double.clear_cache()
    assert double(1.0) == 2


@pytest.mark.parametrize(
    "around",
    [
        overlap,
        jax.jit,
        overlap_jit,
        lambda fun: explain(jax.grad(fun)),
        lambda fun: jax.jit(jax.grad(fun)),
        lambda fun: overlap(jax.grad(fun)),
    ],
    ids=["overlap", "jit", "overlap_jit", "explain(grad)", "jit(grad)", "overlap(grad)"],
)
def test_inside_another_function_it_names_the_order_that_works(around: Callable) -> None:
    with pytest.raises(ValueError, match=r"^overlap_jit: .* write overlap_jit\(overlap\(f\)\), "):
        around(overlap_jit(jnp.sin))(1.0)


def test_gradients_of_what_is_compiled_are_right_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Right since jax 0.12: programs of their own, with the same options."""
    log.warn_once.cache_clear()
    gradient = jax.grad(overlap_jit(jnp.sin))
    if jax.__version_info__ >= (0, 12):
        np.testing.assert_allclose(gradient(0.0), 1.0)
        assert "sin: JAX differentiates what overlap_jit returned" in caplog.text
    else:
        with pytest.raises(ValueError, match=r"overlap_jit\(jax\.grad\(f\)\)"):
            gradient(0.0)


def test_methods() -> None:
    class Scale:
        def __init__(self, factor: float):
            self.factor = factor

        @functools.partial(overlap_jit, static_argnums=0)
        def __call__(self, x):
            return self.factor * x

    assert Scale(3.0)(jnp.float32(2)) == 6


class Crowd:
    """A compiled function that notes whether somebody runs it while another does.

    Whoever runs it first waits there for another to come too, or to wait for a turn.
    """

    def __init__(self) -> None:
        self.other, self.counting = threading.Event(), threading.Lock()
        self.running, self.overlapped = 0, False

    def __call__(self, *_: Any) -> None:
        with self.counting:
            self.running += 1
            if self.running > 1:
                self.overlapped = True
                self.other.set()
        assert self.other.wait(timeout=20)
        with self.counting:
            self.running -= 1


class Turns:
    """The lock that launches take, and tells a crowd of those who wait for it."""

    def __init__(self, lock: Any, crowd: Crowd) -> None:
        self.lock, self.crowd = lock, crowd

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.crowd.other.set()
            self.lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self.lock.release()


@pytest.mark.parametrize("fused", [(False, False), (False, True), (True, True)], ids=str)
def test_programs_that_may_have_kernels_are_launched_one_at_a_time(
    fused: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever they are: two programs, each launched by a thread of its own."""
    crowd = Crowd()
    monkeypatch.setattr(compiler, "_launching", Turns(compiler._launching, crowd))
    programs = [overlap_jit(jnp.sin, peer_kernels=each) for each in fused]
    for program in programs:
        monkeypatch.setattr(program._default, "jitted", crowd)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda program: program(0.0), programs))
    assert crowd.overlapped != all(fused)


def test_what_runs_at_a_launch_may_launch_too() -> None:
    with compiler._launching:
        assert compiler._launching.acquire(blocking=False)  # Else it would wait for itself.
        compiler._launching.release()
        assert overlap_jit(jnp.sin, peer_kernels=True)(0.0) == 0


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The options that `jax.jit` gets from `overlap_jit`."""
    fresh = functools.cache(log.warn_once.__wrapped__)
    monkeypatch.setattr(compiler, "warn_once", fresh)

    def given(peer_kernels: bool = False, **users: Any) -> dict[str, Any]:
        taken: list[dict[str, Any]] = []

        def jit(fun: Callable, *, compiler_options: dict[str, Any] | None = None) -> Callable:
            if compiler_options is not None:
                taken.append(compiler_options)
            return fun

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "jit", jit)
            overlap_jit(lambda: None, peer_kernels=peer_kernels, compiler_options=users)()
        return taken[0]

    return given


def test_options_where_peers_have_access(options: Callable, caplog: Any) -> None:
    assert options() == OVERLAP_OPTIONS
    assert options(xla_embed_ir_in_executable=True) == {
        **OVERLAP_OPTIONS,
        "xla_embed_ir_in_executable": True,
    }
    assert caplog.messages == []


def test_permutes_are_left_to_nccl_where_peers_have_none(
    options: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "GPU 0 cannot address the memory of GPU 1"
    monkeypatch.setattr(compiler, "no_peer_access_reason", lambda: reason)
    others = {name: value for name, value in OVERLAP_OPTIONS.items() if name != PERMUTE_MODE}
    for _ in range(2):
        assert options() == others
    assert caplog.messages == [
        f"overlap_jit leaves permutes to NCCL, where no matmul hides them: {reason}"
    ]


def test_the_users_permute_mode_stays(
    options: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "no_peer_access_reason", lambda: "no access")
    assert options(**{PERMUTE_MODE: "theirs"}) == {**OVERLAP_OPTIONS, PERMUTE_MODE: "theirs"}
    assert caplog.messages == []


def test_with_several_processes_each_ring_has_its_own_transport(
    options: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    own_group = {"xla_gpu_collective_permute_connected_components": True}
    assert options() == {**OVERLAP_OPTIONS, **own_group}
    np.testing.assert_array_equal(overlap_jit(jnp.sin)(0.0), 0.0)  # XLA knows it.


def test_with_several_processes_no_permute_runs_beside_kernels_that_address_peers(
    options: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's kernels execute it there, and wait for multiprocessors that ours hold."""
    name = "xla_gpu_disable_async_collectives"
    assert "COLLECTIVEPERMUTE" not in options(peer_kernels=True)[name].split(",")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    synchronous = options(peer_kernels=True)[name].split(",")
    assert {*synchronous} == {"COLLECTIVEPERMUTE", *PEER_KERNEL_OPTIONS[name].split(",")}
    assert name not in options()
    np.testing.assert_array_equal(overlap_jit(jnp.sin, peer_kernels=True)(0.0), 0.0)


@pytest.mark.parametrize("fused", [False, True])
def test_what_it_returns_can_be_copied(fused: bool) -> None:
    assert copy.deepcopy(overlap_jit(jnp.sin, peer_kernels=fused))(0.0) == 0.0


def test_the_argument_of_an_earlier_release_is_still_accepted() -> None:
    with pytest.warns(DeprecationWarning, match="fused=True is now called peer_kernels=True"):
        jitted = overlap_jit(jnp.sin, fused=True)
    assert jitted._default.has_peer_kernels
    with pytest.warns(DeprecationWarning, match="explain: fused=False is now called"):
        explain(jnp.sin, fused=False)
