"""How Hugging Face names and lays out the parameters of `models.llama.Llama`.

Its linear layers store [out, in], and ours [*in, *out]: the same matrix, transposed. Its files have
a tensor for each matrix of each expert, and our parameters those of all experts of a layer; but in
files of gpt-oss one tensor has gate and up of all experts, whose columns take turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from models.config import LlamaConfig
from models.families import parameter_table, parameters_of
from models.families.parameter_table import Parameter

Index = tuple[slice, ...]

EMBEDDING, HEAD = parameter_table.EMBEDDING.tensor, parameter_table.HEAD.tensor


class Tensor(NamedTuple):
    """A tensor of a file, and the parameter that it is, or a part of it.

    Attributes:
      name: its name in the file.
      groups: for each dimension of the tensor, the sizes of the dimensions of the parameter that
        it consists of.
      transposed: whether the parameter has the groups in the opposite order.
      expert: the place of the tensor in a parameter that has a first dimension of experts; None if
        the tensor is all of it.
      turn: which columns of the tensor are the parameter's, and in turns of how many: (1, 2) are
        every second one. The other columns are those of other parameters.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    transposed: bool
    expert: int | None = None
    turn: tuple[int, int] = (0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        *sizes, columns = map(math.prod, self.groups)
        return *sizes, columns * self.turn[1]

    @property
    def parameter_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups in the order of the parameter."""
        return self.groups[::-1] if self.transposed else self.groups

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of the parameter, without padding; of one expert's part of it."""
        return tuple(itertools.chain(*self.parameter_groups))


def tensors(config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """The name of every parameter of a model whose layers are not stacked, and its tensor.

    A parameter of experts comes once for each expert, in order. Parameters of which one tensor has
    all follow each other, in the order of their turns.
    """
    parts = itertools.groupby(parameters_of(config), key=lambda parameter: parameter.in_layers)
    for in_layers, rows in parts:
        own = list(rows)
        for layer in range(config.num_layers) if in_layers else (0,):
            for parameter in own:
                yield from _tensors_of(parameter, config, layer)


def _tensors_of(
    parameter: Parameter, config: LlamaConfig, layer: int
) -> Iterator[tuple[str, Tensor]]:
    """The name of a parameter, of a layer if all have it, with each of its tensors."""
    name = parameter.path.replace("layers.", f"layers.{layer}.", 1)
    groups, transposed, turn = parameter.groups(config), parameter.transposed, parameter.turn
    for expert in range(config.num_experts or 0) if parameter.of_each_expert else (None,):
        tensor = parameter.tensor.format(layer=layer, expert=expert)
        yield name, Tensor(tensor, groups, transposed, expert, turn)
