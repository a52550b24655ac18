"""The ways to shard layers over the axis: by output or by input features, alone or together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collective_matmul.layers import layer_checks
from collective_matmul.ops.matmul import checks
from collective_matmul.ops.matmul.checks import RecipeName


@dataclass(frozen=True)
class Column:
    """Shards the output features of a layer over the axis and gathers its input.

    If the axis does not divide S, as in decoding with S = 1, the input is not sharded and is not
    gathered.

    Args:
      gather_dimension: the dimension of the input [..., S, K] that is sharded between layers;
        negative numbers count from the features, as if they were one dimension. None: the input is
        the same on every device.
      fp8: None, or the recipe by which operands are quantized to 8 bits, or the name of a
        registered format, as the ops take it.
      heads: number of heads that the output features are, for heads of keys and values that may be
        fewer than devices; None: the axis divides the output features. If heads are fewer, several
        devices compute each: parameters are whole on every device, and the result has a head for
        each device. Of layers with several output dimensions the first is the number of heads; of
        those with one, as `nnx.Linear`, heads follow one another.

    Raises:
      ValueError: for an unknown format, or `heads` that is no whole number of at least 1.
    """

    gather_dimension: int | None = -2
    fp8: RecipeName | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        checks.fp8(self.fp8)
        layer_checks.head_count("heads", self.heads)


@dataclass(frozen=True)
class Row:
    """Shards the input features of a layer over the axis and scatters the sum of its results.

    If the axis does not divide S, the sum is the same on every device.

    Args:
      scatter_dimension: the dimension of the result [..., S, N] to shard; negative numbers count
        from the features, as if they were one dimension. None: the sum is the same on every device.
      fp8: as for `Column`.
    """

    scatter_dimension: int | None = -2
    fp8: RecipeName | None = None

    def __post_init__(self) -> None:
        checks.fp8(self.fp8)


@dataclass(frozen=True)
class Heads:
    """Divides the heads of an attention module over the axis; one gather feeds q, k and v.

    The query, key and value layers are column-parallel, the output layer is row-parallel. The
    attention itself, with its masks, dropout and cache, is the module's own, on each device's
    heads.

    Args:
      gather_dimension: as for `Column`, of the inputs [..., S, features].
      scatter_dimension: as for `Row`, of the result [..., S, features].
      fp8: as for `Column`, of all four layers.
    """

    gather_dimension: int | None = -2
    scatter_dimension: int | None = -2
    fp8: RecipeName | None = None

    def __post_init__(self) -> None:
        checks.fp8(self.fp8)

    def layers(self, key_value_heads: int | None = None) -> dict[str, Column | Row]:
        """The styles of the layers inside Flax's attention modules, by name.

        Args:
          key_value_heads: the number of heads of keys and values, if several devices compute each.
        """
        column = Column(self.gather_dimension, self.fp8)
        key_value = Column(self.gather_dimension, self.fp8, key_value_heads)
        return {
            "query": column,
            "key": key_value,
            "value": key_value,
            "out": Row(self.scatter_dimension, self.fp8),
        }


@dataclass(frozen=True, init=False)
class Shared:
    """Makes layers of a module column-parallel, with one gather for the x that all are called on.

    ``{"layers.*.mlp": Shared("gate", "up")}`` is for a module whose `__call__` calls its layers
    `gate` and `up` on one x: the first call gathers x and multiplies it by both kernels.

    Args:
      *names: the names of the layers in the module that the pattern matches: at least two.
      gather_dimension: as for `Column`.
      fp8: as for `Column`.
      heads: as for `Column`, by the name of each layer, or None. All have heads of one size, by
        which a wrong number is found and refused.

    Raises:
      ValueError: unless there are at least two names, all different, and `heads` has the same,
        each with a whole number of at least 1.
    """

    names: tuple[str, ...]
    gather_dimension: int | None = -2
    fp8: RecipeName | None = None
    heads: tuple[tuple[str, int], ...] = ()

    def __init__(
        self,
        *names: str,
        gather_dimension: int | None = -2,
        fp8: RecipeName | None = None,
        heads: Mapping[str, int] | None = None,
    ):
        if len(names) < 2 or len({*names}) < len(names):
            raise ValueError(
                f"names={names}: expected the names of at least two layers, such as 'gate', 'up'"
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "gather_dimension", gather_dimension)
        # A wrong number is one that makes heads of another size than the other layers have.
        if heads is not None:
            _check_heads_of_all(names, heads)
        object.__setattr__(self, "fp8", checks.fp8(fp8))
        object.__setattr__(self, "heads", tuple((heads or {}).items()))

    def layers(self) -> dict[str, Column]:
        """The style of each layer, by name."""
        heads = dict(self.heads)
        return {
            name: Column(self.gather_dimension, self.fp8, heads.get(name)) for name in self.names
        }

    def paths(self, module: str) -> list[str]:
        """The paths of the layers, from that of the module."""
        return [f"{module}.{name}" if module else name for name in self.names]


def _check_heads_of_all(names: tuple[str, ...], heads: Mapping[str, int]) -> None:
    """Raises ValueError unless `heads` has a number of heads for each layer, and no other key."""
    if not isinstance(heads, Mapping):
        wrong, heads = f"heads={heads!r}", {}
    else:
        missing = [name for name in names if name not in heads]
        others = [name for name in heads if name not in names]
        if not missing and not others:
            for name, number in heads.items():
                layer_checks.head_count(f"heads[{name!r}]", number)
            return
        wrong = f"heads={dict(heads)}"
        if missing:
            wrong += f" has no number for {' and '.join(map(repr, missing))}"
        if others:
            wrong += f"{' and' * bool(missing)} names {' and '.join(map(repr, others))}, which"
            wrong += f" {'is' if len(others) == 1 else 'are'} not among the layers"
    whole = ", ".join(f"{name!r}: {heads.get(name, '...')}" for name in names)
    raise ValueError(
        f"{wrong}; expected the number of heads of each layer that shares the gather:"
        f" heads={{{whole}}}"
    )


#: A parallel style.
ParallelStyle = Column | Row | Heads | Shared

#: A style for each `fnmatch` pattern over dotted paths; ``*`` matches dots too.
ParallelStyles = Mapping[str, ParallelStyle]
