"""References that PyTorch's single ops are checked against: right, and far from wrong results."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from benchmarks.ops.ops import Op

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from benchmarks.pytorch.programs.torch_ops import TorchOps  # noqa: E402
from benchmarks.pytorch.torch_programs import Place, relative_error  # noqa: E402
from benchmarks.pytorch.torch_worker import program_of  # noqa: E402

DEVICES, LAYERS = 4, 2
SIZES = {"rows": 8, "features": 32, "hidden_features": 64}

every_op = pytest.mark.parametrize("op", get_args(Op))


class Alone:
    """The communication of one process, which draws the others' shards itself."""

    def __init__(self, programs: list[Any], rank: int, layer: int):
        self.programs, self.rank, self.layer = programs, rank, layer

    def all_gather_matmul(self, x, w, keep):
        assert not keep
        return torch.cat([program.x(i) for i, program in enumerate(self.programs)]) @ w, None

    def matmul_all_reduce(self, x, w):
        products = [p.x(i) @ p.weight(self.layer, i).t() for i, p in enumerate(self.programs)]
        return torch.stack(products).sum(0)

    def matmul_reduce_scatter(self, x, w):
        return self.matmul_all_reduce(x, w).chunk(DEVICES)[self.rank], lambda: None


def programs_of(op: str, dtype: Any = None) -> list[Any]:
    case = {"name": op, "layers": LAYERS, "op": op, **SIZES}
    return [
        program_of(
            "torch", case, Place(rank, DEVICES, torch.device("cpu")), dtype or torch.float32, 5
        )
        for rank in range(DEVICES)
    ]


@every_op
def test_shards_are_those_of_the_whole_arrays(op: Op) -> None:
    """The devices' references together are whole x times whole w, as a plain matmul has it."""
    programs = programs_of(op)
    gathers = op == "all_gather_matmul"
    x = torch.cat([p.x(i) for i, p in enumerate(programs)], 0 if gathers else 1)
    for layer in range(LAYERS):
        weights = [p.weight(layer, i) for i, p in enumerate(programs)]
        w = torch.cat(weights, 0 if gathers else 1).t()
        assert tuple(x.shape) == (8, 32 if gathers else 64)
        assert tuple(w.shape) == ((32, 64) if gathers else (64, 32))
        parts = [program.reference(LAYERS)[layer] for program in programs]
        if op == "matmul_all_reduce":
            whole = parts[0]
            assert all(torch.equal(part, whole) for part in parts)
        else:
            whole = torch.cat(parts, 1 if gathers else 0)
        torch.testing.assert_close(whole, x @ w)


@every_op
def test_each_weight_has_its_result(op: Op) -> None:
    programs = programs_of(op, torch.bfloat16)
    for rank, program in enumerate(programs):
        expected = program.reference(LAYERS)
        x, weights = program.arguments(LAYERS)
        results = [
            program.run(Alone(programs, rank, layer), x, [w])[0] for layer, w in enumerate(weights)
        ]
        assert 0 < relative_error(results, expected) < program.tolerance
        # The other layer's, and another device's: far beyond rounding.
        assert relative_error(results[::-1], expected) > 0.1
        other = programs[rank - 1].reference(LAYERS)
        if op != "matmul_all_reduce":
            assert relative_error(results, other) > 0.1


def test_an_op_waits_for_what_is_scattered() -> None:
    waited = []

    class Late:
        def matmul_reduce_scatter(self, x, w):
            return x @ w, lambda: waited.append(tuple(w.shape))

    program = programs_of("matmul_reduce_scatter")[0]
    program.run(Late(), *program.arguments(LAYERS))
    # A weight that is kept [out, in] comes transposed.
    assert waited == [(16, 32)] * LAYERS


def test_ops_and_layers_are_told_apart() -> None:
    (program, *_) = programs_of("all_gather_matmul")
    assert isinstance(program, TorchOps) and not program.overlaps
    description = {"name": "", "layers": 1, **SIZES}
    place = Place(0, DEVICES, torch.device("cpu"))
    for direction, overlaps in (("forward", False), ("forward_backward", True)):
        layers = program_of(
            "torch", {**description, "direction": direction}, place, torch.float32, 5
        )
        assert layers.overlaps == overlaps
