"""The work of a device on the tokens of a visit: the products of its experts, and their gradients.

Legend: T tokens of the visit, k experts of a token, M = T k pairs in the order of a `Plan`, E
experts of this device, h the width of tokens, f hidden features. With X, DY the rows of tokens and
of gradients for each pair, p the pairs' weights as a column, and φ the gated activation, such as
σ(G) U::

    G = X w_gate, U = X w_up, A = φ(G, U)      [M, f]
    y = sum over a token's pairs of p A w_down [T, h]

    DA  = DY w_downᵀ                           [M, f]
    dp  = sum over f of DA A                   [M]
    DG, DU = gradients of φ(G, U) for p DA     [M, f]
    dx  = sum over a token's pairs of DG w_gateᵀ + DU w_upᵀ
    dw_gate = Xᵀ DG, dw_up = Xᵀ DU, dw_down = (p A)ᵀ DY, over the rows of each expert

so the gradient of the router's weights needs no product of its own. X and DY are read by index.
Biases are added to the rows of products, outside of the grouped matmuls: see
`collective_matmul.ops.experts.biases`.

With operands in a format, written in brackets, the products are those of rounded numbers. Each
token, each pair's row and each expert's matrix is converted by itself, so nothing depends on which
rows a visit has. What is added before it is scaled is converted together, in double brackets::

    G = [X] [w_gate], U = [X] [w_up], y of p [A] [w_down]
    DA = [DY] [w_downᵀ]
    dx of [[DG]] [[w_gateᵀ]] + [[DU]] [[w_upᵀ]]
    dw_gate = X'ᵀ DG, dw_up = X'ᵀ DU, dw_down = (p A)ᵀ DY'

X' and DY' are what travels in the backward pass: [X] and [DY] if the format packs gradients. Else
they are the arrays, and [DY] is made where they arrive, as is [X] for hidden products that are
computed again. A, DG and DU are made and used on one device, so weight gradients have their arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.dispatch.contract import Direction
from collective_matmul.dispatch.selection import choose
from collective_matmul.mosaic_gpu.grouped_matmul.grouped_matmul import OuterPart
from collective_matmul.operands.format import PLAIN
from collective_matmul.operands.grouped import (
    Conversion,
    as_array,
)
from collective_matmul.operands.multiply import is_array
from collective_matmul.ops.experts.activations import gated_activation
from collective_matmul.ops.experts.biases import (
    ExpertBiases,
    add_bias,
    bias_gradients,
    bias_products,
)
from collective_matmul.ops.experts.grouped.backend import GroupedBackend
from collective_matmul.ops.experts.grouped.request import GroupedOp, GroupedRequest
from collective_matmul.ops.experts.request import ExpertRequest
from collective_matmul.ops.experts.routing import Plan
from collective_matmul.ops.experts.stored_weights import ExpertWeights, stacks_of_pass


class PassWeights(NamedTuple):
    """The weights of one pass, as the chosen backends multiply them.

    Attributes:
      into: gate and up, for the hidden products; None if the pass does not compute them, or if
        `back` serves for both, as arrays do.
      down: of a forward pass; its transpose in a backward pass.
      back: the transposes of gate and up, which a backward pass has. Arrays are not transposed.
      biases: of all three products.
    """

    into: Any
    down: Any
    back: Any = None
    biases: ExpertBiases = ExpertBiases()


class Hidden(NamedTuple):
    """The products of gate and up, [M, f] each, with their biases."""

    gate: Any
    up: Any


class HiddenGradients(NamedTuple):
    """Gradients of hidden products, for one visit.

    Attributes:
      hidden: DG and DU.
      operands: [[DG]] and [[DU]]; none for arrays as they are.
      weighted: p A.
      weights: gradients of the weights of a token's experts, [T, k].
    """

    hidden: Hidden
    operands: Sequence[Any]
    weighted: jax.Array
    weights: jax.Array


class GradientRows(NamedTuple):
    """The rows from which gradients of weights are computed, for one visit.

    Attributes:
      x: tokens [T, h], as they arrived.
      dy: gradients of results [T, h], as they arrived.
      dhidden: DG and DU.
      weighted: p A.
      plan: the order of the pairs.
    """

    x: Any
    dy: Any
    dhidden: Hidden
    weighted: jax.Array
    plan: Plan


class _Product(NamedTuple):
    request: GroupedRequest
    backend: GroupedBackend

    def operands(self, stored: Sequence[Any]) -> list[Any]:
        """Rows or stacks of matrices, as the backend takes them."""
        return [self.backend.operand(self.request, each) for each in stored]


class ExpertWork:
    """The computations of one pass, each with the backend that was chosen for it.

    Args:
      request: the pass.
      rows: pairs of a visit, M.
      activation: as `gated_activation` takes it.
      grouped: names of the requested backends of grouped matmuls, best first, or None.
    """

    def __init__(
        self,
        request: ExpertRequest,
        rows: int,
        activation: str,
        grouped: tuple[str, ...] | None,
    ):
        self.dtype = request.dtype
        self.direction: Direction = request.direction
        self.activation = gated_activation(activation)
        self._rows = rows
        self._request = request
        self._requested = grouped
        h, f = request.width, request.hidden
        self._up = self._down = None
        if request.direction == "forward" or not request.keeps_hidden:
            self._up = self._chosen(h, f)
        if request.direction == "forward":
            self._down = self._chosen(f, h)
        else:
            self._hidden_gradient = self._chosen(h, f, of_gradient=True)
            self._input_gradient = self._chosen(f, h, of_gradient=True, pairs=2)
            self._weight_gradient = self._chosen(h, f, op="grouped_weight_gradient")
            self._down_gradient = self._chosen(f, h, op="grouped_weight_gradient")

    def _chosen(
        self,
        contracted: int,
        columns: int,
        *,
        op: GroupedOp = "grouped_matmul",
        of_gradient: bool = False,
        pairs: int = 1,
    ) -> _Product:
        request, stored = self._request, self._request.format
        if op == "grouped_weight_gradient" and not stored.packs_gradients:
            stored = PLAIN
        grouped = GroupedRequest(
            op=op,
            # Rows that are gradients are multiplied by transposes, which formats make.
            transposed=of_gradient and stored == PLAIN,
            of_gradient=of_gradient and stored != PLAIN,
            format=stored,
            pairs=pairs,
            all_rows=self._rows,
            used_rows=max(1, self._rows // request.expert_devices),
            contracted=contracted,
            columns=columns,
            groups=request.local_experts,
            dtype=request.dtype,
            direction=self.direction,
            source=request.source,
            replaces=request.replaces,
        )
        return _Product(grouped, cast(GroupedBackend, choose(grouped, self._requested)))

    def weights(self, ws: ExpertWeights, biases: ExpertBiases) -> PassWeights:
        """The weights of the pass. Call this once, before the visits."""
        stored, into = self._request.format, None
        if self._up is not None and (self.direction == "forward" or stored != PLAIN):
            stacks = (stacks_of_pass(stored, [w]) for w in (ws.gate, ws.up))
            into = self._up.operands([stack for (stack,) in stacks])
        if self.direction == "forward":
            assert self._down is not None
            (down,) = self._down.operands(stacks_of_pass(stored, [ws.down]))
            return PassWeights(into, down, biases=biases)
        back = stacks_of_pass(stored, [ws.gate, ws.up], transposed=True)
        (down,) = self._hidden_gradient.operands(stacks_of_pass(stored, [ws.down], transposed=True))
        return PassWeights(into, down, self._input_gradient.operands(back), biases)

    def _conversion(self, count: int, **options: Any) -> Conversion | None:
        """How the first results of `map_rows` become operands; None for arrays as they are."""
        stored = self._request.format
        return None if stored == PLAIN else Conversion(stored, count, **options)

    def _in_format(self, product: _Product, x: Any, *, of_gradient: bool = False) -> Any:
        """The operand of a product, from an array or from rows in the format."""
        conversion = self._conversion(1, of_gradient=of_gradient)
        if conversion is not None and is_array(x):
            all_rows = vary_over(jnp.int32(len(x)), varying_axes(x))
            (x,) = product.backend.map_rows(
                lambda x: ((x,), None), [x], [], all_rows, results=1, conversion=conversion
            )
        return product.operands([x])[0]

    def hidden(self, x: Any, plan: Plan, ws: PassWeights) -> Hidden:
        """The products of gate and up with tokens, which may be in the format already."""
        assert self._up is not None
        request, backend = self._up
        rows = self._in_format(self._up, x)
        products = backend.matmuls(request, rows, ws.into or ws.back, plan.sizes, plan.tokens)
        biases = ws.biases.gate, ws.biases.up
        return Hidden(*(add_bias(p, b, plan) for p, b in zip(products, biases, strict=True)))

    def activated(self, hidden: Hidden, plan: Plan) -> Any:
        """A, as `down` takes it."""
        assert self._up is not None
        assert self._down is not None

        def fun(gate: jax.Array, up: jax.Array) -> tuple:
            return (self.activation(gate, up),), None

        (activated,) = self._up.backend.map_rows(
            fun, hidden, [], plan.count, results=1, conversion=self._conversion(1)
        )
        return self._down.operands([activated])[0]

    def down(
        self, activated: Any, plan: Plan, ws: PassWeights, columns: tuple[int, int] | None = None
    ) -> jax.Array:
        """[T, columns]: each token's weighted sum over its experts here."""
        assert self._down is not None
        request, backend = self._down
        rows = backend.matmul(request, [(activated, ws.down)], plan.sizes, columns=columns)
        bias = ws.biases.down
        if bias is not None and columns is not None:
            bias = bias[:, slice(*columns)]
        rows = add_bias(rows, bias, plan)
        return backend.sum_rows(rows, plan.places, plan.count, plan.weights, self.dtype)

    def hidden_gradients(
        self, dy: Any, hidden: Hidden, plan: Plan, ws: PassWeights
    ) -> HiddenGradients:
        """The gradients of what was kept or computed again, and of the routing's weights."""
        request, backend = self._hidden_gradient
        rows = self._in_format(self._hidden_gradient, dy, of_gradient=True)
        gradient = backend.matmul(request, [(rows, ws.down)], plan.sizes, plan.tokens)

        def fun(gradient: jax.Array, gate: jax.Array, up: jax.Array, weight: jax.Array) -> tuple:
            activated, pullback = jax.vjp(self.activation, gate, up)
            return (*pullback(weight * gradient), weight * activated), gradient * activated

        dgate, dup, weighted, dweights, *operands = backend.map_rows(
            fun,
            [gradient, *hidden],
            [plan.row_weights],
            plan.count,
            results=3,
            row_sums=True,
            conversion=self._conversion(2, of_gradient=True, keeps_arrays=True),
        )
        dweights = plan.of_tokens(dweights)
        if ws.biases.down is not None:
            dweights += bias_products(as_array(dy, self.dtype), ws.biases.down, plan)
        return HiddenGradients(Hidden(dgate, dup), operands, weighted, dweights)

    def input_gradient(self, gradients: HiddenGradients, plan: Plan, ws: PassWeights) -> jax.Array:
        """Dx [T, h], this device's term."""
        request, backend = self._input_gradient
        operands = self._input_gradient.operands(gradients.operands or gradients.hidden)
        pairs = [*zip(operands, ws.back, strict=True)]
        rows = backend.matmul(request, pairs, plan.sizes)
        return backend.sum_rows(rows, plan.places, plan.count, None, self.dtype)

    def weight_gradients(
        self, visits: Sequence[GradientRows], added_to: ExpertWeights | None
    ) -> ExpertWeights:
        """The gradients of weights of some visits, added to those of others before."""
        before = added_to or ExpertWeights(None, None, None)
        request, backend = self._weight_gradient
        xs = self._weight_gradient.operands([v.x for v in visits])
        of_x = [
            backend.contracted_rows(request, x, v.plan.tokens, v.plan.count)
            for x, v in zip(xs, visits, strict=True)
        ]

        def of_inputs(name: str) -> jax.Array:
            parts = [
                OuterPart(x, getattr(v.dhidden, name), v.plan.sizes, left_index=index)
                for v, (x, index) in zip(visits, of_x, strict=True)
            ]
            return backend.weight_gradient(request, parts, getattr(before, name))

        return ExpertWeights(of_inputs("gate"), of_inputs("up"), self._of_down(visits, before.down))

    def bias_gradients(
        self, visits: Sequence[GradientRows], biases: ExpertBiases, added_to: ExpertBiases | None
    ) -> ExpertBiases:
        """The gradients of biases of some visits, in float32 or wider, added to those before."""
        total = added_to
        for v in visits:
            dy = v.dy if biases.down is None else as_array(v.dy, self.dtype)
            own = bias_gradients(biases, v.dhidden, dy, v.plan)
            total = own if total is None else jax.tree.map(jnp.add, total, own)
        assert total is not None
        return total

    def _of_down(self, visits: Sequence[GradientRows], before: Any) -> jax.Array:
        request, backend = self._down_gradient
        # Copies cost as much as those for gate and up, which are two: the same sizes decide.
        of_up = self._weight_gradient.request
        dys = self._down_gradient.operands([v.dy for v in visits])
        of_dy = [
            backend.contracted_rows(of_up, dy, v.plan.tokens, v.plan.count)
            for dy, v in zip(dys, visits, strict=True)
        ]
        parts = [
            OuterPart(v.weighted, dy, v.plan.sizes, right_index=index)
            for v, (dy, index) in zip(visits, of_dy, strict=True)
        ]
        return backend.weight_gradient(request, parts, before)
