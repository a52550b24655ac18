"""Equations that communicate over mesh axes: which axes, and for how long."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import jax
from jax.extend.core import JaxprEqn

from collective_matmul.hardware import Rates
from collective_matmul.jaxprs.graph import communicates, type_of


def axes_of(equation: JaxprEqn) -> tuple:
    """The mesh axes that a collective communicates over."""
    parameters = equation.params
    axes = parameters["axes"] if "axes" in parameters else parameters["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def is_collective_kernel(equation: JaxprEqn) -> bool:
    """Whether NCCL's kernels execute the equation.

    They execute any communication but permutes within one process, which are copies.
    """
    name = equation.primitive.name
    if name == "ppermute":
        return jax.process_count() > 1
    if name == "axis_index":
        return False
    return communicates(equation) and not equation.params.keys().isdisjoint(("axes", "axis_name"))


def collective_seconds(
    equation: JaxprEqn,
    axis_sizes: Mapping[str, int],
    gpu: Rates,
    between_nodes: Collection[str] = (),
) -> float:
    """Predicted seconds of a collective alone; 0 over axes of one device.

    Args:
      equation: an equation that communicates between all devices of its axes.
      axis_sizes: the sizes of mesh axes.
      gpu: rates of the devices.
      between_nodes: the axes that cross nodes; along all others there is NVLink.
    """
    devices = math.prod(axis_sizes.get(axis, 1) for axis in axes_of(equation))
    if groups := equation.params.get("axis_index_groups"):
        devices = max(map(len, groups))
    if devices == 1:
        return 0.0
    name = equation.primitive.name
    crosses = not {*axes_of(equation)}.isdisjoint(between_nodes)
    larger = equation.outvars if name.startswith("all_gather") else equation.invars
    arrays = map(type_of, larger)
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    if name == "ppermute":
        return gpu.collective_seconds + size / _rate(gpu, crosses)
    sums = name.startswith(("psum", "pmax", "pmin"))
    return seconds_of_bytes(size, devices, gpu, crosses, passes=2 if sums else 1)


def seconds_of_bytes(size: int, devices: int, gpu: Rates, crosses: bool, passes: int) -> float:
    """Predicted seconds of a collective alone, between devices that each need all of an array.

    Args:
      size: bytes of the array.
      devices: their number.
      gpu: their rates.
      crosses: whether they are on several nodes.
      passes: how often each byte travels: once where it is gathered, twice where it is summed.
    """
    return gpu.collective_seconds + passes * size * (devices - 1) / devices / _rate(gpu, crosses)


def _rate(gpu: Rates, crosses: bool) -> float:
    return gpu.network_bytes if crosses else gpu.link_bytes
