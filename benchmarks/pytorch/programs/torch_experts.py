"""Expert layers in PyTorch: `grouped_mm` between collectives, in two ways.

"torch_all_to_all" sends each device the rows that its experts need, as torchtitan does: devices
tell each other the sizes, and the host reads them. "torch_all_gather" gathers all tokens and adds
results by a reduce-scatter. Copies of rows are permutations, and so are their gradients: PyTorch's
own gradient of an index is a scatter that adds, and slower.

Legend: T tokens of a device, D devices, N = D T, k experts of a token, h features, f hidden
features, E experts, R rows of pairs of a token and an expert.
"""

# PyTorch is not a dependency: where it is not installed, nothing here is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pytorch.torch_programs import (
    Failure,
    Measuring,
    Place,
    Run,
    computed,
    relative_error,
    require_right,
)

#: The ways to run each candidate. "compiled" is one program with its collectives, whose sizes do
#: not depend on the routing; "compiled parts", those between collectives and what the host reads.
WAYS = {
    "torch_all_to_all": ("compiled parts", "eager"),
    "torch_all_gather": ("compiled", "compiled parts", "eager"),
}
#: Tokens of each device whose results are checked.
CHECKED_TOKENS = 64
#: Largest relative error. Rounding to bfloat16 between operators leaves about 0.005.
TOLERANCE = 0.02

Layer = Callable[..., Tensor]


class Arguments(NamedTuple):
    """A device's arrays. Weights are as a linear layer of PyTorch has them: outputs, inputs."""

    x: Tensor  # [T, h]
    ids: Tensor  # [T, k]
    weights: Tensor  # [T, k], float32
    gate: Tensor  # [E/D, f, h]
    up: Tensor  # [E/D, f, h]
    down: Tensor  # [E/D, h, f]
    dy: Tensor  # [T, h]

    def differentiated(self) -> list[Tensor]:
        """The arrays that have gradients, as leaves of a graph."""
        arrays = self.x, self.weights, self.gate, self.up, self.down
        return [array.detach().requires_grad_() for array in arrays]


class Rows(NamedTuple):
    """Which row of one array is copied to which rows of another.

    Attributes:
      sources: [R], the row that each copy is of.
      copies: [n, c], the copies of each row.
      here: [n, c], whether there is such a copy; None: all are.
    """

    sources: Tensor
    copies: Tensor
    here: Tensor | None = None


def _sums(values: Tensor, copies: Tensor, here: Tensor | None) -> Tensor:
    chosen = values[copies]
    if here is not None:
        chosen = torch.where(here[..., None], chosen, 0)
    return (
        chosen[:, 0]
        if copies.shape[1] == 1
        else chosen.sum(1, dtype=torch.float32).to(values.dtype)
    )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rows: Any) -> Tensor:
        ctx.save_for_backward(*rows[1:])
        return x[rows[0]]

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return _sums(*dy, *ctx.saved_tensors), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *rows: Any) -> Tensor:
        ctx.save_for_backward(rows[0])
        return _sums(values, *rows[1:])

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return dy[0][ctx.saved_tensors[0]], None, None, None


def copy_rows(x: Tensor, rows: Rows) -> Tensor:
    """[n, h] to [R, h]."""
    return _Copy.apply(x, *rows)  # pyright: ignore[reportReturnType]


def sum_copies(values: Tensor, rows: Rows) -> Tensor:
    """[R, h] to [n, h], the opposite of `copy_rows`: the sum of the copies of each row."""
    return _Sum.apply(values, *rows)  # pyright: ignore[reportReturnType]


def _sorted(keys: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of keys, the place of each in it, and where each group ends."""
    ordered, order = torch.sort(keys, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(groups, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return order, places, ends


def _experts(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """The experts' results for rows in the order of experts."""
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    multiply = functools.partial(product, offs=ends)
    hidden = F.silu(multiply(rows, gate.mT)) * multiply(rows, up.mT)
    return multiply(hidden, down.mT)


def _weighted_sums(y: Tensor, weights: Tensor, rows: Rows, pairs: Rows) -> Tensor:
    """[R, h] to [n, h]; `rows` has tokens as sources, and `pairs` numbers in `weights`."""
    factors = copy_rows(weights.reshape(-1, 1), pairs)
    return sum_copies(y * factors.to(y.dtype), rows)


class ExpertCollectives:
    """Differentiable collectives of all devices, of those that the compiler knows."""

    def __init__(self, place: Place):
        self.place = place
        self.group = dist.group.WORLD.group_name if place.devices > 1 else ""

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] of each device to [D n, ...]."""
        return _Gather.apply(x, self)  # pyright: ignore[reportReturnType]

    def scatter(self, x: Tensor) -> Tensor:
        """[D n, ...] to [n, ...], a part of the sum."""
        return _Scatter.apply(x, self)  # pyright: ignore[reportReturnType]

    def exchange(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """So many rows from each device, and to each."""
        return _Exchange.apply(x, received, sent, self)  # pyright: ignore[reportReturnType]

    def all_gather(self, x: Tensor) -> Tensor:
        if self.place.devices == 1:
            return x
        function = torch.ops._c10d_functional.all_gather_into_tensor
        return self._wait(function(x.contiguous(), self.place.devices, self.group))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if self.place.devices == 1:
            return x
        function = torch.ops._c10d_functional.reduce_scatter_tensor
        return self._wait(function(x.contiguous(), "sum", self.place.devices, self.group))

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        if self.place.devices == 1:
            return x
        function = torch.ops._c10d_functional.all_to_all_single
        return self._wait(function(x.contiguous(), received, sent, self.group))

    def _wait(self, pending: Tensor) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(pending)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: ExpertCollectives) -> Tensor:
        ctx.collectives = collectives
        return collectives.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return ctx.collectives.reduce_scatter(*dy), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: ExpertCollectives) -> Tensor:
        ctx.collectives = collectives
        return collectives.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return ctx.collectives.all_gather(*dy), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: Any, sent: Any, collectives: ExpertCollectives
    ) -> Tensor:
        ctx.sizes, ctx.collectives = (sent, received), collectives
        return collectives.all_to_all(x, received, sent)

    @staticmethod
    def backward(ctx: Any, *dy: Any) -> Any:
        return ctx.collectives.all_to_all(*dy, *ctx.sizes), None, None, None


class AllToAll:
    """Rows travel to their experts and back.

    Args:
      collectives: the devices'.
      experts: E.
      compiled: compiles a function, or not.
    """

    def __init__(self, collectives: ExpertCollectives, experts: int, compiled: Callable):
        self.collectives, self.experts = collectives, experts
        self.route, self.compute = compiled(self._route), compiled(self._compute)
        self.combine = compiled(_weighted_sums)

    def __call__(self, x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> Tensor:
        devices = self.collectives.place.devices
        rows, tokens, pairs, counts = self.route(x, ids)
        equal = [self.experts // devices] * devices
        arriving = self.collectives.all_to_all(counts, equal, equal)
        sizes = torch.stack([arriving, counts]).view(2, devices, -1).sum(2)
        received, sent = sizes.tolist()  # The host waits for the device here.
        rows = self.collectives.exchange(rows, received, sent)
        y = self.compute(rows, arriving, gate, up, down)
        y = self.collectives.exchange(y, sent, received)
        return self.combine(y, weights, tokens, pairs)

    def _route(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Rows, Rows, Tensor]:
        k = ids.shape[1]
        order, places, ends = _sorted(ids.reshape(-1), self.experts)
        tokens = Rows(order // k, places.view(-1, k))
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return copy_rows(x, tokens), tokens, Rows(order, places[:, None]), counts

    def _compute(self, rows: Any, arriving: Any, gate: Any, up: Any, down: Any) -> Tensor:
        """Rows come by device and then by expert; the experts take them by expert."""
        local = len(gate)
        numbers = torch.arange(local, dtype=torch.int32, device=rows.device).repeat(
            len(arriving) // local
        )
        numbers = torch.repeat_interleave(numbers, arriving, output_size=len(rows))
        order, places, ends = _sorted(numbers, local)
        y = _experts(copy_rows(rows, Rows(order, places[:, None])), gate, up, down, ends)
        return copy_rows(y, Rows(places, order[:, None]))


class AllGather:
    """Tokens travel to all devices, and sums of results back.

    Args:
      collectives: the devices'.
      compiled: compiles a function, or not.
      static: whether there is room for all pairs on every device, so that the host needs no size.
    """

    def __init__(self, collectives: ExpertCollectives, compiled: Callable, *, static: bool):
        self.collectives, self.static = collectives, static
        self.route, self.compute = compiled(self._route), compiled(self._compute)

    def __call__(self, x: Any, ids: Any, weights: Any, gate: Any, up: Any, down: Any) -> Tensor:
        gather = self.collectives.gather
        order, places, ends = self.route(self.collectives.all_gather(ids), len(gate))
        rows = len(order) if self.static else int(ends[-1])
        y = self.compute(gather(x), gather(weights), order[:rows], places, ends, gate, up, down)
        return self.collectives.scatter(y)

    def _route(self, ids: Tensor, local: int) -> tuple[Tensor, Tensor, Tensor]:
        numbers = ids.reshape(-1) - self.collectives.place.rank * local
        return _sorted(torch.where((numbers >= 0) & (numbers < local), numbers, local), local)

    def _compute(
        self, x: Any, weights: Any, order: Any, places: Any, ends: Any, *experts: Tensor
    ) -> Tensor:
        k, here = weights.shape[1], places < ends[-1]
        copies = places.clamp(max=len(order) - 1)
        tokens = Rows(order // k, copies.view(-1, k), here.view(-1, k))
        pairs = Rows(order, copies[:, None], here[:, None])
        gate, up, down = experts
        y = _experts(copy_rows(x, tokens), gate, up, down, ends)
        if self.static:  # Kernels do not write rows of no group.
            is_here = torch.arange(len(order), device=y.device) < ends[-1]
            y = torch.where(is_here[:, None], y, 0)
        return _weighted_sums(y, weights, tokens, pairs)


def layer_of(name: str, way: str, place: Place, experts: int, compiler: str) -> Layer:
    """A candidate, run in a way of `WAYS`."""

    def compiled(function: Callable) -> Callable:
        return torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)

    def unchanged(function: Callable) -> Callable:
        return function

    collectives = ExpertCollectives(place)
    parts = compiled if way == "compiled parts" else unchanged
    if name == "torch_all_to_all":
        return AllToAll(collectives, experts, parts)
    layer = AllGather(collectives, parts, static=way == "compiled")
    return compiled(layer.__call__) if way == "compiled" else layer


def run_of(layer: Layer, arguments: Arguments, *, differentiated: bool) -> Run:
    """Computes the result, or it and all gradients."""

    def of_leaves(x: Tensor, weights: Tensor, *ws: Tensor) -> Tensor:
        return layer(x, arguments.ids, weights, *ws)

    dy = arguments.dy if differentiated else None
    return functools.partial(computed, of_leaves, arguments.differentiated(), dy)


class TorchExperts:
    """The candidates of one layer.

    Args:
      worker: measures.
      case: name, candidates, tokens, width, hidden, experts, choices and groups.
      dtype: of everything but the router's weights.
    """

    def __init__(self, worker: Measuring, case: dict[str, Any], dtype: torch.dtype):
        self.worker, self.case, self.dtype = worker, case, dtype
        self.place = worker.place
        self.arguments = self.draw(self.place.rank)
        self.expected: list[Tensor] | None = None

    def results(self) -> Iterator[dict[str, Any]]:
        """The results of each candidate and way, forward and then with gradients."""
        for direction in ("forward", "gradients"):
            described: dict[str, dict[str, Any]] = {}
            runs: dict[str, Run] = {}
            for name in self.case["candidates"]:
                for way in WAYS[name]:
                    key = f"{name}, {way}"
                    described[key] = {"name": f"{self.case['name']} {direction}"}
                    described[key] |= {"candidate": name, "options": way}
                    described[key] |= {"layer": self.case, "devices": self.place.devices}
                    try:
                        self.worker.log(f"{described[key]['name']}, {key}: begins")
                        runs[key] = self.prepare(name, way, direction, described[key])
                    except Failure as failure:
                        described[key]["failure"] = str(failure)
            for key, samples in self.worker.measure(runs, self.case["groups"]).items():
                described[key]["samples"] = samples
            yield from described.values()

    def prepare(self, name: str, way: str, direction: str, result: dict[str, Any]) -> Run:
        """A warm function that was checked; raises Failure if it fails or is wrong."""
        if self.worker.out_of_time():
            raise Failure("the time was over before its turn")
        experts, compiler = self.case["experts"], self.worker.compiler or "aot_eager"
        differentiated = direction == "gradients"

        def build() -> Run:
            layer = layer_of(name, way, self.place, experts, compiler)
            run = run_of(layer, self.arguments, differentiated=differentiated)
            run()
            return run

        run = self.worker.together(build)
        error = self.worker.together(lambda: self.error(run()))
        result["relative_error"] = self.worker.largest(error)
        require_right(result["relative_error"], TOLERANCE, "the float32 reference")
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.worker.together(run)
        peak = torch.cuda.max_memory_allocated() if self.place.device.type == "cuda" else 0
        result["peak_bytes"] = int(self.worker.largest(peak))
        return run

    def draw(self, rank: int) -> Arguments:
        """The arrays of any device; each can draw those of all."""
        tokens, h, f = (self.case[size] for size in ("tokens", "width", "hidden"))
        experts, k = self.case["experts"], self.case["choices"]
        local, device = experts // self.place.devices, self.place.device
        generator = torch.Generator(device).manual_seed(rank)

        def normal(*size: int, scale: float) -> Tensor:
            array = torch.randn(size, generator=generator, dtype=self.dtype, device=device)
            return array.mul_(scale)

        weights = torch.rand(tokens, k, generator=generator, device=device)
        ids = torch.rand(tokens, experts, generator=generator, device=device).argsort(1)[:, :k]
        return Arguments(
            x=normal(tokens, h, scale=1.0),
            ids=ids.to(torch.int32),
            weights=weights / weights.sum(1, keepdim=True),
            gate=normal(local, f, h, scale=h**-0.5),
            up=normal(local, f, h, scale=h**-0.5),
            down=normal(local, h, f, scale=f**-0.5),
            dy=normal(tokens, h, scale=1.0),
        )

    def error(self, found: list[Tensor]) -> float:
        """The largest relative error of a run's arrays, of what `reference` computes."""
        self.expected = self.expected or self.reference(CHECKED_TOKENS)
        parts = [*(array[:CHECKED_TOKENS] for array in found[:3]), *(w[0] for w in found[3:])]
        return relative_error(parts, self.expected[: len(parts)])

    def reference(self, tokens: int) -> list[Tensor]:
        """In float32: y, and the gradients of x and the router's weights, of the first tokens; and
        the gradients of the weights of this device's first expert.
        """
        arguments = [self.draw(rank) for rank in range(self.place.devices)]
        own, local = arguments[self.place.rank], len(self.arguments.gate)
        x, weights = (a[:tokens].float().requires_grad_() for a in (own.x, own.weights))
        y = x.new_zeros(x.shape)
        for e in range(self.case["experts"]):
            home = arguments[e // local]
            experts = [w[e % local].float() for w in (home.gate, home.up, home.down)]
            factors = ((own.ids[:tokens] == e) * weights).sum(1, keepdim=True)
            y = y + factors * _expert(x, *experts)
        first = self.place.rank * local
        ws = [w[0].float().requires_grad_() for w in (own.gate, own.up, own.down)]
        dws = [torch.zeros_like(w) for w in ws]
        for a in arguments:
            number, choice = (a.ids == first).nonzero(as_tuple=True)
            partial = a.weights[number, choice, None] * _expert(a.x[number].float(), *ws)
            grads = torch.autograd.grad(partial, ws, a.dy[number].float())
            dws = [total + grad for total, grad in zip(dws, grads, strict=True)]
        return [y.detach(), *torch.autograd.grad(y, (x, weights), own.dy[:tokens].float()), *dws]


def _expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT
