"""`Fused`: one kernel per op, which communicates while it multiplies, without its host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import jax
from jax import lax

from collective_matmul import data
from collective_matmul.dispatch.contract import Configuration, Prediction
from collective_matmul.hardware import HOPPER, rates
from collective_matmul.mosaic_gpu import requirements
from collective_matmul.operands.chunked import Gathered
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.multiply import is_array, multiplied
from collective_matmul.ops.matmul.backend import MatmulBackend
from collective_matmul.ops.matmul.fused import all_gather, reduce_scatter
from collective_matmul.ops.matmul.fused.all_gather_config import AllGatherConfig
from collective_matmul.ops.matmul.fused.reduce_scatter_config import ReduceScatterConfig
from collective_matmul.ops.matmul.fused.weights import operands_of
from collective_matmul.ops.matmul.matmul_cost import weight_gradient_seconds
from collective_matmul.ops.matmul.request import Site
from collective_matmul.peer_access import no_peer_access_reason

#: Predictions err by a tenth, those of XLA with few rows by up to a fifth; sums of few rows are
#: predicted up to 60 % too slow.
ERROR = 0.15
#: With operands in 8 bits. Layers of 8192 rows take as long as with rings, where a tenth less is
#: predicted; fewer rows are not measured. So the model is not believed, only tables are.
FP8_ERROR = math.inf

#: Inside a stack a kernel takes longer than its configuration predicts, which is measured alone on
#: a cool GPU: by this factor, and by these seconds to begin.
SLOWDOWN = 1.05
START_SECONDS = 4e-6

T = TypeVar("T")


@dataclass(frozen=True)
class Fused(MatmulBackend):
    """The fused kernels, each with the best known configuration or with the given one."""

    config: AllGatherConfig | ReduceScatterConfig | None = None

    name = "fused"
    uses_peer_kernels = True
    predicts_precisely = False

    def all_gather_matmul(
        self, request: Site, x: Any, ws: Sequence[Any]
    ) -> tuple[tuple[jax.Array, ...], Gathered]:
        """Multiplies tiles of x as they arrive; see `MatmulBackend`.

        An array that travels beside rows in 8 bits is gathered by a collective before the kernel.
        """
        beside = None if is_array(x) else x.array
        sent, whole = _gathered_before(multiplied(x), beside, request)
        ys, gathered = all_gather.all_gather_matmul(
            sent,
            ws,
            request.axis_name,
            dimension=request.shard_dimension,
            transpose_w=request.transpose_w,
            keep_gathered=request.keep_gathered and beside is None,
            config=cast(AllGatherConfig | None, self.config),
        )
        if beside is not None:
            return ys, dataclasses.replace(x, packed=None, array=whole)
        return ys, gathered

    def matmul_reduce_scatter(
        self, request: Site, xs: Sequence[Any], ws: Sequence[Any], co_gathered: Any = None
    ) -> tuple[jax.Array, Gathered]:
        """Sums tiles where they belong as they arrive; see `MatmulBackend`.

        `co_gathered` is gathered by a collective before the kernel.
        """
        xs, gathered = _gathered_before(xs, co_gathered, request)
        y = reduce_scatter.matmul_reduce_scatter(
            xs,
            ws,
            request.axis_name,
            dimension=request.shard_dimension,
            transpose_w=request.transpose_w,
            config=self._reduce_config,
        )
        return y, gathered

    def matmul_all_reduce(self, request: Site, xs: Sequence[Any], ws: Sequence[Any]) -> jax.Array:
        """Sums tiles in one shot or two; see `MatmulBackend`. There is one x and one w."""
        (x,), (w,) = xs, ws
        axis_name = request.axis_name
        return reduce_scatter.matmul_all_reduce(x, w, axis_name, config=self._reduce_config)

    @property
    def _reduce_config(self) -> ReduceScatterConfig | None:
        return cast(ReduceScatterConfig | None, self.config)

    def multiplied_dtypes(self, site: Site) -> tuple[str, str]:
        """The dtypes of the operands: what the kernels cannot multiply in 8 bits they refuse."""
        return site.operand_dtypes

    def unsupported_reason(self, site: Site) -> str | None:
        """A kernel needs a Hopper GPU, half precision, and a tiling that fits the sizes."""
        if site.op == "matmul_all_reduce" and len(site.operands) > 1:
            return "the kernel of an all-reduce executes one matmul, not several"
        if site.format != PLAIN and site.format.scaled_parts is None:
            return f"the kernels do not multiply operands in {site.format.name!r}"
        reason = _of_op(
            site,
            all_gather.all_gather_unsupported_reason,
            reduce_scatter.reduce_scatter_unsupported_reason,
            reduce_scatter.all_reduce_unsupported_reason,
        )
        return reason or no_peer_access_reason() or requirements.peer_arrays_reason(site.transport)

    def predict(self, site: Site) -> Prediction | None:
        """The prediction of the kernel's configuration, and what stacks add to it."""
        if rates() is None or site.einsum is not None or self.unsupported_reason(site):
            return None
        error = ERROR if site.format == PLAIN else FP8_ERROR
        return Prediction(_seconds(site), error, HOPPER.basis)

    def configurations(self, site: Site) -> Sequence[Configuration]:
        """The feasible configurations of the op's kernel."""
        return _of_op(
            site,
            all_gather.all_gather_configs,
            reduce_scatter.reduce_scatter_configs,
            reduce_scatter.all_reduce_configs,
        )

    def configured(self, configuration: Configuration) -> Self:
        """These kernels, held to one configuration, which must be one of the site's."""
        return dataclasses.replace(self, config=configuration)

    def configuration_record(
        self, site: Site, configuration: Any, microseconds: float
    ) -> data.Record:
        """The record that the library's table of configurations is read from."""
        call = _of_op(
            site,
            all_gather.all_gather_call,
            reduce_scatter.reduce_scatter_call,
            reduce_scatter.all_reduce_call,
        )
        return call.record(configuration, microseconds)


def _seconds(site: Site) -> float:
    """Predicted seconds of a site. A second array is gathered by a collective first."""
    co_gathering = 0.0
    if site.co_gathered_bytes:
        co_gathering = HOPPER.collective_seconds + site.co_gathered_bytes / HOPPER.link_bytes
    sending = (site.bytes_communicated - site.co_gathered_bytes) / HOPPER.link_bytes
    on_device = max(SLOWDOWN * _kernel_seconds(site), sending)
    return on_device + START_SECONDS + co_gathering + weight_gradient_seconds(site)


def _kernel_seconds(site: Site) -> float:
    return _of_op(
        site,
        all_gather.all_gather_predicted_seconds,
        reduce_scatter.reduce_scatter_predicted_seconds,
        reduce_scatter.all_reduce_predicted_seconds,
    )


def _of_op(
    site: Site,
    all_gather: Callable[..., T],
    reduce_scatter: Callable[..., T],
    all_reduce: Callable[..., T],
) -> T:
    """The result of the function for the site's op, called with its local shapes."""
    xs, ws = operands_of(site)
    if site.op == "matmul_all_reduce":
        return all_reduce(xs[0], ws[0], site.axis_size)
    assert site.dimension is not None
    layout = {"dimension": site.dimension, "transpose_w": site.transpose_w}
    if site.op == "all_gather_matmul":
        return all_gather(xs[0], ws, site.axis_size, **layout)
    return reduce_scatter(xs, ws, site.axis_size, **layout)


def _gathered_before(operands: T, co_gathered: Any, request: Site) -> tuple[T, Any]:
    """The operands of a kernel; and `co_gathered` whole, gathered before the kernel begins.

    Beside the kernel, the collective would hold multiprocessors here and wait for a device whose
    kernel holds all of them.
    """
    if co_gathered is None:
        return operands, None

    def gather(array: jax.Array) -> jax.Array:
        return lax.all_gather(array, request.axis_name, axis=request.shard_dimension, tiled=True)

    return lax.optimization_barrier((operands, jax.tree.map(gather, co_gathered)))
