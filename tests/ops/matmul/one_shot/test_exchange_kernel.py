"""One-shot collectives lower for CUDA, to kernels that are ordinary ones for XLA and the host."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct
from jax.sharding import PartitionSpec as P

from collective_matmul.mosaic_gpu.peers import symmetric_workspace
from collective_matmul.ops.matmul.one_shot import backend, exchange_kernel
from collective_matmul.ops.matmul.one_shot.backend import OneShot
from tests.conftest import MeshFactory
from tests.hopper import assert_an_ordinary_kernel, needs_kernels
from tests.reference import AXIS

pytestmark = pytest.mark.usefixtures("_for_hopper")

COLLECTIVES: dict[str, Callable] = {
    "gather": exchange_kernel.all_gather,
    "scatter": exchange_kernel.reduce_scatter,
    "reduce": exchange_kernel.all_reduce,
}


@dataclass(frozen=True)
class Call:
    """A call of a collective: `shape` is what each device sends to each peer."""

    kind: str
    shape: tuple[int, ...]
    devices: int = 4
    dtype: str = "bfloat16"
    check_vma: bool = True
    race_delays: bool = False
    repeats: int = 1

    def traced(self, make_mesh: MeshFactory) -> Any:
        """Traces repeated calls, each on the result of the call before."""
        collective = functools.partial(
            COLLECTIVES[self.kind], axis_name=AXIS, race_delays=self.race_delays
        )
        shape = (self.devices, *self.shape) if self.kind == "scatter" else self.shape

        def call(x: jax.Array) -> list[jax.Array]:
            return [collective(x + number) for number in range(self.repeats)]

        sharded = jax.shard_map(
            call,
            mesh=make_mesh({AXIS: self.devices}),
            in_specs=P(AXIS),
            out_specs=P() if self.kind == "reduce" else P(AXIS),
            check_vma=self.check_vma,
        )
        whole = ShapeDtypeStruct((self.devices * shape[0], *shape[1:]), self.dtype)
        return jax.jit(sharded).trace(whole)

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the results of all devices, joined."""
        if self.kind == "reduce":
            return self.shape
        if self.kind == "gather":
            return (self.devices**2, *self.shape)
        return (self.devices * self.shape[0], *self.shape[1:])


def lowered(traced: Any) -> str:
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def struct(elements: int, dtype: str = "bfloat16") -> ShapeDtypeStruct:
    return ShapeDtypeStruct((elements,), dtype)


BOX_ELEMENTS, MOST_ELEMENTS = exchange_kernel._SMALLEST_BOX // 2, exchange_kernel.MOST_BYTES // 2
CALLS = {
    "an element": ((1,), {}),
    "odd sizes": ((3, 5, 7), {"dtype": "float16", "check_vma": False}),
    "two devices, delayed": ((BOX_ELEMENTS + 1,), {"devices": 2, "race_delays": True}),
    "more than the smallest boxes of all blocks": (
        (symmetric_workspace.EXCHANGE_BLOCKS * BOX_ELEMENTS + 3,),
        {},
    ),
    "the most": ((MOST_ELEMENTS,), {"devices": 2, "check_vma": False}),
}


@needs_kernels
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_call_lowers_to_one_ordinary_kernel(
    kind: str, call: tuple, make_mesh: MeshFactory
) -> None:
    shape, facts = call
    collective = Call(kind, shape, **facts)
    traced = collective.traced(make_mesh)
    (result,) = traced.out_info
    assert (result.shape, result.dtype) == (collective.result, collective.dtype)
    text = lowered(traced)
    assert_an_ordinary_kernel(text)
    assert len(re.findall(r"call @launch", text)) == 1
    assert_no_other_collective(text)


def assert_no_other_collective(text: str) -> None:
    others = "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute"
    assert not re.search(rf"stablehlo\.({'|'.join(others)})\b", text)


@needs_kernels
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_equal_launches_share_their_kernel(kind: str, make_mesh: MeshFactory) -> None:
    text = lowered(Call(kind, (40,), devices=3, repeats=4).traced(make_mesh))
    assert text.count("custom_call @mosaic_gpu") == 1
    assert len(re.findall(r"call @launch", text)) == 4


@needs_kernels
@pytest.mark.parametrize("steps", [1, 2])
def test_all_reduces_are_typed_as_replicated(
    steps: int, make_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two shots, the gathered sums are the same on all devices too."""
    monkeypatch.setattr(backend, "is_two_shot", lambda size, devices: steps == 2)
    sharded = jax.shard_map(
        lambda x: OneShot().all_reduce(x, AXIS),
        mesh=make_mesh({AXIS: 4}),
        in_specs=P(AXIS),
        out_specs=P(),
    )
    text = lowered(jax.jit(sharded).trace(struct(4 * 10)))
    assert text.count("custom_call @mosaic_gpu") == steps
    assert_no_other_collective(text)


@needs_kernels
@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("check_vma", [False, True])
def test_vmap_executes_one_exchange_after_the_other(
    kind: str, check_vma: bool, make_mesh: MeshFactory
) -> None:
    shape = (5, 2, 8) if kind == "scatter" else (5, 8)
    sharded = jax.shard_map(
        jax.vmap(lambda x: COLLECTIVES[kind](x, AXIS)),
        mesh=make_mesh({AXIS: 2}),
        in_specs=P(None, None, AXIS) if kind == "scatter" else P(None, AXIS),
        out_specs=P() if kind == "reduce" else P(None, AXIS),
        check_vma=check_vma,
    )
    x = ShapeDtypeStruct((*shape[:-1], 2 * shape[-1]), jnp.bfloat16)
    text = lowered(jax.jit(sharded).trace(x))
    assert text.count("custom_call @mosaic_gpu") == 1 and "stablehlo.while" in text


@needs_kernels
@pytest.mark.parametrize(
    ("x", "devices", "reason"),
    [
        (struct(MOST_ELEMENTS), 8, None),
        (struct(3, "float16"), 2, None),
        (
            struct(MOST_ELEMENTS + 1),
            2,
            f"({MOST_ELEMENTS + 1},) are {exchange_kernel.MOST_BYTES + 2} bytes for each peer, and"
            f" one shot takes {exchange_kernel.MOST_BYTES}",
        ),
        (struct(8, "float32"), 2, "dtypes ['float32']: "),
        (struct(8), 1, "an axis of size 1: "),
        (struct(0), 2, "an array without elements: "),
    ],
    ids=str,
)
def test_unsupported_reason_names_what_is_wrong(
    x: ShapeDtypeStruct, devices: int, reason: str | None
) -> None:
    found = exchange_kernel.unsupported_reason(x, devices)
    assert found == reason or (reason and found and found.startswith(reason))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_too_much_is_refused(kind: str, make_mesh: MeshFactory) -> None:
    """Larger messages would be stored in the regions of others."""
    shape = 3, MOST_ELEMENTS // 3 + 1
    sentence = (
        f"({shape[0]}, {shape[1]}) are {exchange_kernel.MOST_BYTES + 2} bytes for each peer,"
        f" and one shot takes {exchange_kernel.MOST_BYTES};"
        " send it in parts, or by XLA's collective"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        Call(kind, shape, devices=2).traced(make_mesh)


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 0)])
def test_kernels_need_jax_0_11(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    found = exchange_kernel.unsupported_reason(struct(8), 2)
    assert (found is None) == (version >= (0, 11))
    assert found is None or "these kernels need 0.11 or newer" in found


def test_an_all_reduce_is_two_shot_where_that_sends_less() -> None:
    for devices in (2, 4, 8):
        sizes = [1 << bits for bits in range(4, 24)]
        steps = [backend.is_two_shot(size, devices) for size in sizes]
        assert not steps[0] and steps == sorted(steps)
        assert steps[-1]  # Too much for one shot.
        for size, two in zip(sizes, steps, strict=True):
            parts = 2 * backend.exchange_seconds(-(-size // devices), devices)
            faster = parts < backend.exchange_seconds(size, devices)
            assert two == (faster or size > exchange_kernel.MOST_BYTES)


def test_boxes_hold_all_elements_and_fit_their_regions() -> None:
    for elements in (
        1,
        BOX_ELEMENTS,
        symmetric_workspace.EXCHANGE_BLOCKS * BOX_ELEMENTS + 1,
        MOST_ELEMENTS,
    ):
        x = np.resize(np.arange(1 << 12, dtype=np.uint16), elements).view(np.float16)
        boxes = np.asarray(exchange_kernel._boxes(jnp.asarray(x)))
        count, size = boxes.shape[0], boxes[0].nbytes
        assert boxes.reshape(-1)[:elements].tobytes() == x.tobytes()
        assert (count - 1) * boxes.shape[1] < elements
        turns = -(-count // symmetric_workspace.EXCHANGE_BLOCKS)
        assert (turns - 1) * exchange_kernel._LARGEST_BOX + size <= symmetric_workspace.REGION_BYTES
        # Another box is begun by a block only if none could be larger.
        assert turns == 1 or size == exchange_kernel._LARGEST_BOX
