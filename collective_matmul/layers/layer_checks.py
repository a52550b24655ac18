"""Checks of the arguments of layers, before anything is traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from collective_matmul.layers.sharding_context import (
    LocalShards,
    ShardingContext,
    known_axis_size,
)
from collective_matmul.operands.quantized import Quantized
from collective_matmul.operands.sharded import WeightShards
from collective_matmul.ops.experts.activations import ACTIVATIONS
from collective_matmul.ops.matmul.checks import shown


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Names the layer at `path` in errors about its arguments; the model itself has no name.

    Raises:
      ValueError: for one inside.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}" if path else str(error)) from None


def sizes(argument: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """`value` as a tuple.

    Raises:
      ValueError: unless it is a whole number of at least 1, or several of them.
    """
    several = tuple(value) if isinstance(value, Sequence) else (value,)
    if not several or any(not isinstance(n, int | np.integer) or n < 1 for n in several):
        raise ValueError(
            f"{argument}={value!r}: expected a whole number of at least 1, or several of them"
        )
    return several


def head_count(argument: str, value: Any) -> None:
    """Raises ValueError unless `value` is a number of heads, or None where it is not said."""
    if value is not None and (not isinstance(value, int | np.integer) or value < 1):
        raise ValueError(
            f"{argument}={value!r}: expected the number of heads, a whole number of at least 1"
        )


def features(argument: str, value: int | Sequence[int], axis_name: str, devices: int) -> None:
    """Checks that the axis divides `value`, or the first of several sizes.

    Raises:
      ValueError: if it does not.
    """
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    size = sizes[0]
    if size % devices:
        shown = size if len(sizes) == 1 else sizes
        below = size // devices * devices
        nearest = f"{below} or {below + devices}" if below else f"{devices}"
        raise ValueError(
            f"{argument}={shown}: {size} is not divisible by axis {axis_name!r} of size {devices};"
            f" the nearest to it: {nearest}{_copies_instead(argument, sizes, devices)}"
        )


def _copies_instead(argument: str, sizes: tuple[int, ...], devices: int) -> str:
    """Advice for fewer heads, or other features that stay together, than devices."""
    if argument != "out_features" or len(sizes) == 1 or devices % sizes[0]:
        return ""
    return f"; or let several devices compute each: heads={sizes[0]}"


def copies(
    value: int, heads: int | None, outputs: Sequence[int], axis_name: str, devices: int | None
) -> int:
    """The number of devices that compute each head of a layer.

    Args:
      value: the number that was asked for; 1: what follows from `heads`.
      heads: the number of heads, or None: the first of several output features.
      outputs: the output features.
      axis_name: the mesh axis.
      devices: its size, or None if it is not known.

    Raises:
      ValueError: unless the heads, each as often as it is computed, are one for each device.
    """
    head_count("heads", heads)
    if value == 1 and heads is None:
        return 1
    if heads is None and len(outputs) == 1:
        raise ValueError(
            f"copies={value}: out_features={outputs[0]} does not say how many heads it has; pass"
            " their number, heads=, or out_features=(heads, features of one)"
        )
    count = outputs[0] if heads is None else heads
    _check_heads(count, outputs)
    if value == 1:
        return copies_of_heads(count, axis_name, devices)
    if value < 1 or (devices is not None and count * value != devices):
        raise ValueError(
            f"copies={value}: expected the {devices} devices of axis {axis_name!r} over the"
            f" {count} heads of out_features={_shown(outputs)}, or 1 if there are no fewer heads"
            " than devices"
        )
    return value


def _shown(outputs: Sequence[int]) -> int | tuple[int, ...]:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _check_heads(heads: int, outputs: Sequence[int]) -> None:
    """Raises ValueError unless the output features can be those of so many heads."""
    (size, *others), shown = outputs, _shown(outputs)
    if others and heads != size:
        raise ValueError(
            f"heads={heads}: the first of out_features={shown} is the number of heads; pass"
            f" heads={size}"
        )
    if size % heads:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - heads))[:4])
        raise ValueError(
            f"heads={heads}: does not divide out_features={shown}, the features of all heads, one"
            f" head after the other; expected a divisor, such as {', '.join(map(str, nearest))}"
        )


def copies_of_heads(heads: int | None, axis_name: str, devices: int | None) -> int:
    """The number of devices that compute each of several heads, or 1 if `heads` is None.

    Raises:
      ValueError: if the size of the axis is unknown, or is neither a divisor nor a multiple of
        `heads`.
    """
    if heads is None:
        return 1
    if devices is None:
        raise ValueError(
            f"heads={heads}: how many devices compute each depends on the size of axis"
            f" {axis_name!r}, which is not known here; pass mesh=, or call this inside"
            " `with jax.set_mesh(mesh):`"
        )
    if heads % devices and devices % heads:
        fitting = [n for n in range(1, devices) if n % heads == 0 or heads % n == 0]
        raise ValueError(
            f"heads={heads}: axis {axis_name!r} of size {devices} neither divides the heads nor is"
            f" a multiple of them; correct the number of heads, or take a smaller axis that fits:"
            f" {', '.join(map(str, fitting))}"
        )
    return max(devices // heads, 1)


def weight_features(size: int, axis_name: str, devices: int, over_axis: int) -> None:
    """Checks the dimension of a kernel that a second axis shards.

    Args:
      size: its size.
      axis_name: the second axis.
      devices: the size of that.
      over_axis: in how many pieces the layer's own axis divides the dimension.

    Raises:
      ValueError: if they do not divide it.
    """
    if size % (devices * over_axis):
        also = f" in {over_axis} parts along the layer's own axis" if over_axis > 1 else ""
        raise ValueError(
            f"weight_axis_name={axis_name!r}: its {devices} devices do not divide {size} features"
            f"{also}; expected a multiple of {devices * over_axis}, or a parallelize of its own for"
            " this layer, without weight_axis_name"
        )


def whole_kernels(copies: int, weight_axis_name: str | None) -> None:
    """Raises ValueError for a second axis of a kernel that several devices use."""
    if copies != 1 and weight_axis_name is not None:
        raise ValueError(
            f"weight_axis_name={weight_axis_name!r}: kernels with copies={copies} are whole on"
            f" every device, as {copies} devices compute each head; leave it out for such a layer"
            " and those that share its gather, by a parallelize of their own"
        )


def equal_heads(outputs: Mapping[str, Sequence[int]], heads: Mapping[str, int]) -> None:
    """Checks that layers which share a gather have heads of one size, as queries and keys need.

    Args:
      outputs: the output features of each layer, by path.
      heads: how many heads they are, for layers of which that was said.

    Raises:
      ValueError: if a layer's features are not those of so many heads, or of heads of another size.
    """
    sizes: dict[str, int] = {}
    for path, count in heads.items():
        with naming(path):
            _check_heads(count, outputs[path])
        sizes[path] = math.prod(outputs[path]) // count
    if len({*sizes.values()}) > 1:
        found = "; ".join(
            f"{path!r} has {math.prod(outputs[path])} features, {heads[path]} heads of {size}"
            for path, size in sizes.items()
        )
        raise ValueError(
            f"heads={dict(heads)}: expected heads of one size, found: {found}; correct the number"
            " of heads"
        )


def heads(path: str, module: Any, axis_name: str, mesh: Mesh | AbstractMesh | None) -> int | None:
    """Checks that the axis, if its size is known, divides the heads of Flax's attention.

    Returns:
      The number of heads of keys and values, if there are fewer of these than devices.

    Raises:
      ValueError: if it divides them neither, nor their copies.
    """
    devices = known_axis_size(axis_name, mesh) or 1
    key_value_heads = getattr(module, "num_kv_heads", module.num_heads)
    with naming(path):
        features("num_heads", module.num_heads, axis_name, devices)
        if devices % key_value_heads:
            features("num_kv_heads", key_value_heads, axis_name, devices)
    return key_value_heads if key_value_heads < devices else None


def kernel(
    value: jax.Array | Quantized,
    features: tuple[tuple[int, ...], tuple[int, ...]],
    sharded_dimension: int,
    context: ShardingContext,
    weight_shards: WeightShards | None,
) -> None:
    """Checks the shape of a kernel, local or global according to `context`.

    Args:
      value: the kernel.
      features: the global sizes of its input features, and of its output features.
      sharded_dimension: the dimension that the axis of `context` shards.
      context: whether it is local.
      weight_shards: how a second axis shards it too, or None.

    Raises:
      ValueError: if it is not the (shard of the) global kernel, or global and quantized, or the
        axes do not divide it.
    """
    if isinstance(value, Quantized) and not isinstance(context, LocalShards):
        raise ValueError(
            f"kernel: quantized, in a layer outside of a shard_map over axis {context.axis_name!r};"
            " expected a shard, as scales are those of a device; call the layer inside"
            " jax.shard_map over that axis"
        )
    shape = (*features[0], *features[1])
    expected = list(shape)
    expected[sharded_dimension] //= context.parameter_shards
    axes = f"axis {context.axis_name!r}"
    local = isinstance(context, LocalShards)
    if weight_shards is not None:
        place = len(features[0]) if weight_shards.dimension else 0
        over_axis = context.devices if place == sharded_dimension else 1
        weight_features(shape[place], weight_shards.axis_name, weight_shards.axis_size, over_axis)
        expected[place] //= weight_shards.axis_size if local else 1
        axes = f"axes {context.axis_name!r} and {weight_shards.axis_name!r}"
    if value.shape == tuple(expected):
        return
    if isinstance(value, Quantized) and value.array is None:  # It is a matrix.
        count = len(features[0])
        if value.shape == (math.prod(expected[:count]), math.prod(expected[count:])):
            return
    if not local or (context.parameter_shards == 1 and weight_shards is None):
        advice = f"the global shape {shape}"
    else:
        advice = (
            f"{tuple(expected)}, this device's shard over {axes} of the global"
            f" {shape}; pass the parameters through shard_map with the in_specs that"
            " nnx.get_partition_spec gives for nnx, partition_specs for linen"
        )
    raise ValueError(f"kernel: shape {value.shape}; expected {advice}")


def input_features(x: Any, expected: tuple[int, ...]) -> None:
    """Checks that x is [..., *K] with features `expected` and at least one dimension before them.

    Raises:
      ValueError: if it is not.
    """
    if x.ndim <= len(expected) or x.shape[-len(expected) :] != expected:
        names = ", ".join(map(str, expected))
        raise ValueError(
            f"x: shape {x.shape}; expected [..., {names}], the features that the kernel here"
            " contracts"
        )


def leading_dimension(argument: str, value: int | None, count: int) -> int | None:
    """`value` counted from the front, for arrays of `count` leading dimensions and one of features.

    Raises:
      ValueError: if it is not a leading dimension.
    """
    if value is None:
        return None
    if not -count - 1 <= value < count or value == -1:
        raise ValueError(
            f"{argument}={value}: there are {count} dimension(s) before the features; expected one"
            f" from {-count - 1} to -2, or from 0 to {count - 1}"
        )
    return value % (count + 1)


def router(
    experts: int,
    choices: int,
    score: str,
    scores: tuple[str, ...],
    groups: int,
    chosen_groups: int,
) -> None:
    """Checks the options of a router.

    Args:
      experts: their number.
      choices: the number of experts of a token.
      score: the name of the score.
      scores: the names there are.
      groups: the number of groups of experts.
      chosen_groups: the number of groups that a token's experts are from.

    Raises:
      ValueError: if they do not fit.
    """
    sizes("experts", experts)
    if not isinstance(choices, int) or not 1 <= choices <= experts:
        raise ValueError(
            f"choices={choices!r}: expected a whole number from 1 to experts={experts}"
        )
    if score not in scores:
        raise ValueError(f"score={score!r}: expected one of {', '.join(map(repr, scores))}")
    if not isinstance(groups, int) or groups < 1 or experts % groups:
        raise ValueError(f"groups={groups!r}: expected a number that divides experts={experts}")
    if not isinstance(chosen_groups, int) or not 1 <= chosen_groups <= groups:
        raise ValueError(
            f"chosen_groups={chosen_groups!r}: expected a whole number from 1 to groups={groups}"
        )
    if chosen_groups * (experts // groups) < choices:
        raise ValueError(
            f"chosen_groups={chosen_groups}: {chosen_groups} of {groups} groups have"
            f" {chosen_groups * (experts // groups)} experts, fewer than choices={choices}; choose"
            " more groups"
        )


def shared_expert(shared_features: int, shared_gate: bool, activation: str) -> None:
    """Checks the options of a shared expert.

    Raises:
      ValueError: if there is none to gate, its features are no size, or it has no such activation.
    """
    if shared_features:
        sizes("shared_features", shared_features)
        if activation not in ACTIVATIONS:
            names = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(
                f"activation={activation!r}: a shared expert has one of {names}; with"
                " shared_features=0 there is none"
            )
    elif shared_gate:
        raise ValueError(
            f"shared_gate={shared_gate}: shared_features={shared_features}, so there is no shared"
            " expert to gate; give its hidden features"
        )


def data_axes(value: Any, *others: str) -> tuple[str, ...]:
    """A layer's `data_axis_name` as a tuple.

    Raises:
      TypeError: if it is neither a name nor a sequence of names.
      ValueError: if it names an axis twice, or one of `others`, over which the layer works.
    """
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"data_axis_name={shown(value)}: expected the name of a mesh axis that shards dimension"
            " 0 of activations, a tuple of names, or () for none"
        )
    if len({*others, *names}) < len(others) + len(names):
        raise ValueError(
            f"data_axis_name={shown(value)}: expected mesh axes that differ from each other and"
            " from those that the layer works over"
        )
    return tuple(names)


def distinct_axes(names: Sequence[str]) -> None:
    """Checks the axes of a layer.

    Raises:
      ValueError: if one is named twice.
    """
    if len(set(names)) < len(names):
        raise ValueError(
            f"axis_name, hidden_axis_name, weight_axis_name and data_axis_name: {tuple(names)} has"
            " an axis twice; name each axis once"
        )
