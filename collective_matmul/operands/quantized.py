"""`Quantized`: a weight that ops multiply in 8 bits, or in another format that is no array.

An op converts such a weight for its forward pass, and its transpose for the backward pass, which
contracts the other dimension. Either may have been made before, for several calls. A weight that is
trained has its array, which takes the gradient; a frozen one has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from collective_matmul._compat import vary_over, varying_axes
from collective_matmul.operands.format import PLAIN, Format
from collective_matmul.operands.sharded import Sharded, WeightShards, sharding_of, stored


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight [K, *N] in a format, which ops take in place of an array.

    `collective_matmul.prequantize` makes both matrices before; after each change of the array they
    must be made anew. Ops multiply with them, and do not read the values of the array: it stands
    for its shape and dtype, and it is what the gradient belongs to. `collective_matmul.prescale`
    only finds what their scales depend on, and ops make the matrices.

    Attributes:
      array: [K, *N]; None for a frozen weight, which has no gradient.
      forward: the matrix [K, N], for ``x w``; None if each op makes it.
      backward: the matrix [N, K] of the transpose, for ``dy wᵀ``; likewise.
      format: the format.
      number: index in the jointly converted group.
      count: number of weights in that group.
      shards: how a second mesh axis shards the weight, of which array and matrices are this
        device's shard, or None. What the matrices have in common is that of the whole.
      stacked: whether the weight is a stack [G, K, N] of matrices, each converted by itself; then
        forward and backward are stacks, and `shards` says how each matrix is sharded.
      magnitudes: `Format.magnitudes` of the array [K, N], in the dtype of the op, or of its shard;
        None if they are not known. Matrices that were made before need none.
    """

    array: Any
    forward: Any
    backward: Any
    format: Format = field(metadata={"static": True})
    number: int = field(default=0, metadata={"static": True})
    count: int = field(default=1, metadata={"static": True})
    shards: WeightShards | None = field(default=None, metadata={"static": True})
    stacked: bool = field(default=False, metadata={"static": True})
    magnitudes: Any = None

    @property
    def fp8(self) -> str:
        """The name of the format."""
        return self.format.name

    @property
    def shape(self) -> tuple[int, ...]:
        """[K, *N] or [G, K, N]; of a frozen weight, that of its matrix or matrices."""
        if self.array is not None:
            return self.array.shape
        if not self.stacked:
            return self.forward.shape
        # A single matrix knows its shape: that of a shard, whose scales are those of the whole.
        return jax.eval_shape(jax.vmap(lambda matrix: jnp.empty(matrix.shape)), self.forward).shape

    @property
    def dtype(self) -> Any:
        """The array's dtype, which is that of its gradient; else that of products."""
        return self.forward.product_dtype if self.array is None else self.array.dtype

    @property
    def frozen(self) -> Quantized:
        """The weight without its array. Only the matrices occupy memory, and it has no gradient.

        Raises:
          ValueError: if there are no matrices.
        """
        if self.forward is None:
            raise ValueError("w: not quantized yet; expected matrices; call prequantize first")
        return dataclasses.replace(self, array=None)

    def with_array(self, array: jax.Array) -> Quantized:
        """The matrices with another array of these values."""
        return dataclasses.replace(self, array=array)

    def reshape(self, *shape: int) -> Quantized:
        """The array in another shape. The matrices stay what they are."""
        return self if self.array is None else self.with_array(self.array.reshape(*shape))

    def astype(self, dtype: Any) -> Quantized:
        """The array in another dtype. An op takes the one that was quantized."""
        return self if self.array is None else self.with_array(self.array.astype(dtype))

    @property
    def T(self) -> Quantized:
        """The transpose of a matrix, whose forward is the backward of this.

        Raises:
          ValueError: if it is a stack of matrices, or was quantized together with others, which
            have no transpose in common.
        """
        if self.stacked:
            raise ValueError("w: a stack of matrices; expected one matrix to transpose")
        if self.count > 1:
            raise ValueError(
                f"w: quantized together with {self.count - 1} others; expected one alone to"
                " transpose; call prequantize for it"
            )
        return dataclasses.replace(
            self,
            array=None if self.array is None else self.array.T,
            forward=self.backward,
            backward=self.forward,
            shards=self.shards and self.shards.transposed,
            magnitudes=None,
        )

    def gathered(self, dimension: int) -> Quantized:
        """The whole of a shard, whose matrices are gathered in 8 bits.

        Its array is not gathered: it is NaN, in the dtype of the products. It is there for its
        gradient, which is that of the whole weight, and is still to be scattered.

        Args:
          dimension: the dimension of the array that the axis shards.

        Raises:
          ValueError: if it is not a shard.
        """
        if self.shards is None:
            raise ValueError(
                "w: quantized as a whole; expected a shard to gather; name its axis when you call"
                " prequantize, by weight_axis_name"
            )
        array = None
        if self.array is not None:
            shape = list(self.shape)
            shape[dimension] *= self.shards.axis_size
            array = jnp.full(shape, jnp.nan, self.forward.product_dtype)
            array = vary_over(array, varying_axes(self.array))
        return dataclasses.replace(self.with_whole_matrices, array=array)

    @property
    def with_whole_matrices(self) -> Quantized:
        """The weight of a shard whose matrices are gathered, those that it has; and its array."""
        shards = self.shards
        assert shards is not None

        def whole(matrix: Any, shards: WeightShards) -> Any:
            gather = lambda matrix: Sharded(matrix, shards).gathered()  # noqa: E731
            if matrix is None:
                return None
            return jax.vmap(gather)(matrix) if self.stacked else gather(matrix)

        forward, backward = whole(self.forward, shards), whole(self.backward, shards.transposed)
        return dataclasses.replace(self, forward=forward, backward=backward, shards=None)


def typed(w: Any) -> jax.Array:
    """An array of a weight's dtype, for the promotion of dtypes."""
    return jnp.zeros((), w.dtype) if isinstance(w, Quantized) and w.array is None else array_of(w)


def array_of(w: Any) -> jax.Array:
    """A weight as an array; of a frozen one, what its matrix stands for."""
    if not isinstance(w, Quantized):
        return w
    return w.forward.dequantized().astype(w.dtype) if w.array is None else w.array


def format_of(ws: Sequence[Any]) -> Format:
    """The format of an op's weights."""
    first = stored(ws[0])
    return first.format if isinstance(first, Quantized) else PLAIN


def arrays_of(ws: Sequence[Any]) -> tuple[Any, ...]:
    """An op's weights as arrays, or shards of them."""
    values = [w.array if isinstance(w, Quantized) else w for w in map(stored, ws)]
    pairs = zip(ws, values, strict=True)
    return tuple(w.with_value(value) if isinstance(w, Sharded) else value for w, value in pairs)


def prepared(
    ws: Sequence[Any], dtype: Any, *, transposed: bool = False, together: bool = True
) -> tuple[Any, ...]:
    """The weights of one pass, as backends take them: arrays, matrices, or shards of such.

    Args:
      ws: the weights of an op.
      dtype: the dtype of the program, to which arrays of shards are cast.
      transposed: whether they are for the backward pass. Arrays stay as they are.
      together: whether they are operands of one sum of products.
    """
    sharding, values = sharding_of(ws[0]), [stored(w) for w in ws]
    if sharding is not None and not isinstance(values[0], Quantized):
        values = [w.astype(dtype) for w in values]
    if isinstance(values[0], Quantized):
        groups = [values] if together else [[w] for w in values]
        values = [m for group in groups for m in matrices_of(group, dtype, transposed, sharding)]
        sharding = sharding and (sharding.transposed if transposed else sharding)
    return tuple(values if sharding is None else (Sharded(w, sharding) for w in values))


def matrices_of(
    ws: Sequence[Quantized], dtype: Any, transposed: bool, sharding: WeightShards | None
) -> Sequence[Any]:
    """The matrices of weights [K_i, N] that are operands of one sum of products.

    Args:
      ws: the weights, which all have their matrices, or none has.
      dtype: the dtype of the program, to which arrays are cast.
      transposed: whether the results are [N, K_i].
      sharding: the `WeightShards` of shards, as of [K, N]; or None.
    """
    made = [w.backward if transposed else w.forward for w in ws]
    if made[0] is not None:
        return made
    arrays, form = [w.array.astype(dtype) for w in ws], ws[0].format
    known = [w.magnitudes for w in ws]
    if any(each is None for each in known):
        return form.matrices(arrays, transposed=transposed, sharding=sharding)
    return form.matrices_with_magnitudes(arrays, known, transposed=transposed, sharding=sharding)


def read_by_backward(w: Any) -> Any:
    """The arrays that a backward pass reads of a weight."""
    value = stored(w)
    if not isinstance(value, Quantized):
        return value
    return value.array if value.backward is None else value.backward


def with_read(w: Any, arrays: Any) -> Any:
    """A weight with other arrays in place of those of `read_by_backward`."""
    value = stored(w)
    if isinstance(value, Quantized):
        name = "array" if value.backward is None else "backward"
        arrays = dataclasses.replace(value, **{name: arrays})
    return w.with_value(arrays) if isinstance(w, Sharded) else arrays


def is_trained(w: Any) -> bool:
    """Whether a weight has a gradient."""
    value = stored(w)
    return not isinstance(value, Quantized) or value.array is not None


def gradient_of(w: Any, gradient: jax.Array | None) -> Any:
    """The gradient of a weight as JAX wants it: a pytree like the weight."""
    value = stored(w)
    made: Any = gradient if gradient is None else gradient.astype(value.dtype)
    if isinstance(value, Quantized):
        unread = {"forward": None, "backward": None, "magnitudes": None}
        made = dataclasses.replace(value, array=made, **unread)
    return w.with_value(made) if isinstance(w, Sharded) else made
