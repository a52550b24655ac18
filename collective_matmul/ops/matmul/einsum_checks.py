"""The labels and sizes of a collective einsum are checked here, and what is gathered is found."""

from __future__ import annotations

import jax
from jax import lax

from collective_matmul.ops.matmul.equation import Equation


def communicated_label(gather: str | None, scatter: str | None, x: str, w: str, y: str) -> str:
    """The label that is gathered or scattered.

    Raises:
      ValueError: unless exactly one argument is given and names a label that can be.
    """
    if (gather is None) == (scatter is None):
        raise ValueError(
            f"gather={gather!r}, scatter={scatter!r}: expected one of them, and not the other, to"
            " name a label; an einsum that communicates nothing is jax.numpy.einsum"
        )
    argument, label = ("gather", gather) if scatter is None else ("scatter", scatter)
    equation = f"{x},{w}->{y}"
    if not isinstance(label, str) or len(label) != 1 or label not in x + w:
        raise ValueError(f"{argument}={label!r}: expected one of the labels of {equation!r}")
    if argument == "scatter" and label not in y:
        raise ValueError(
            f"scatter={label!r}: the result of {equation!r} does not have it; expected a label of"
            " the result"
        )
    if argument == "gather" and max(x.count(label), w.count(label)) > 1:
        raise ValueError(
            f"gather={label!r}: an operand of {equation!r} has it twice, so that its shards lack"
            " parts of the diagonal; gather the operand with jax.lax.all_gather"
        )
    if argument == "gather" and (x + w + y).count(label) == 1:
        raise ValueError(
            f"gather={label!r}: {equation!r} sums one operand alone over it; use jax.numpy.sum,"
            " and jax.lax.psum over the axis, which communicate less"
        )
    return label


def label_sizes(name: str, labels: str, array: jax.Array) -> dict[str, int]:
    """The size of every label.

    Raises:
      ValueError: if a label occurs twice and has two sizes.
    """
    sizes = dict(zip(labels, array.shape, strict=True))
    if tuple(sizes[label] for label in labels) != array.shape:
        raise ValueError(
            f"{name}: shape {array.shape} with labels {labels!r}, one of which has two sizes;"
            " expected the same wherever a label occurs"
        )
    return sizes


def check_equal_sizes(x: dict[str, int], w: dict[str, int], gather: str | None) -> None:
    """Raises ValueError unless both operands agree on sizes, except that of the gathered label."""
    for label in x:
        if label != gather and x[label] != w.get(label, x[label]):
            raise ValueError(
                f"w: label {label!r} of {''.join(w)!r} has size {w[label]}, and in x"
                f" ({''.join(x)!r}) {x[label]}; expected the same"
            )


def gathers_w(label: str, x: dict[str, int], w: dict[str, int], axis_name: str) -> bool:
    """Whether w is the operand to gather, by the sizes of the labels of both.

    Raises:
      ValueError: if the label is empty, or if both have it and neither has 1/D of it.
    """
    devices = lax.axis_size(axis_name)
    sizes = [operand[label] for operand in (x, w) if label in operand]
    if 0 in sizes:
        raise ValueError(f"gather={label!r}: size 0; expected at least 1 on every device")
    if len(sizes) == 1:
        return label in w
    if x[label] * devices == w[label]:
        return False
    if w[label] * devices == x[label]:
        return True
    raise ValueError(
        f"gather={label!r}: size {x[label]} in x and {w[label]} in w; expected one to be a shard of"
        f" the other, 1/{devices} of it by axis {axis_name!r}; if both are shards, call"
        " jax.numpy.einsum first, and then jax.lax.psum or all_gather"
    )


def check_matmul(subscripts: str, equation: Equation, fp8: str) -> None:
    """Raises ValueError unless the einsum is a matmul of whole dimensions, which `fp8` needs."""
    if equation.is_matmul:
        return
    if equation.batch:
        wrong = f"label {equation.batch[0]!r} is in both operands and in the result"
    elif equation.accumulates:
        wrong = f"the gathered label {equation.label!r} is contracted"
    elif not equation.contracted or not equation.columns:
        wrong = "it contracts nothing" if equation.columns else "one operand has no free label"
    else:
        a, y = equation.rows + equation.contracted, equation.rows + equation.columns
        wrong = f"expected one operand as {a!r} and the result as {y!r}"
    raise ValueError(
        f"fp8={fp8!r}: subscripts={subscripts!r} is not a matmul of whole dimensions: {wrong};"
        " expected [rows, contracted] times [contracted, columns] -> [rows, columns], with the"
        f" label {equation.label!r} among the rows, as in 'bsd,dhk->bshk'; reorder the dimensions,"
        " or leave fp8 out"
    )


def check_divisible(label: str, size: int, axis_name: str) -> None:
    """Raises ValueError unless the axis divides the size of the label, and the size is not 0."""
    devices = lax.axis_size(axis_name)
    if size == 0:
        raise ValueError(f"scatter={label!r}: size 0; expected at least {devices}")
    if size % devices:
        raise ValueError(
            f"scatter={label!r}: size {size} is not divisible by axis {axis_name!r} of size"
            f" {devices}; pad it to {-(-size // devices) * devices}"
        )
