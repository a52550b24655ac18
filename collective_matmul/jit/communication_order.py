"""The order in which a compiled program communicates.

Each process compiles for its own devices. If two of them communicate in different orders, devices
wait for each other for ever, or NCCL pairs collectives that have nothing to do with each other, and
numbers are silently wrong. XLA's processes compile the same program as long as they share what they
find out by trying kernels: GPUs of two processes do not find the same kernels fastest, and fusion
and the order of instructions follow.
"""

from __future__ import annotations

import re

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "recv",
    "reduce-scatter",
    "send",
)
#: The result's shape and the opcode of an instruction that communicates or starts to. A kernel of
#: Mosaic may: what it addresses is not in the text.
_INSTRUCTION = re.compile(
    rf" = (?P<shape>.+?) (?P<opcode>(?:{'|'.join(_COLLECTIVES)})(?:-start)?|custom-call)\("
)
_KERNEL = re.compile(r'custom_call_target="mosaic_gpu')
_LAYOUT = re.compile(r"(?<=\])\{[^}]*\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')
#: Numbers of what a process has traced, which others may have traced more or less often.
_NUMBERS = re.compile(r"\bcollective_matmul\.decision\d+_\d+/?")


def communication_order(program: str) -> list[str]:
    """Lists what communicates in a compiled program, as lines of opcode, shape and source.

    Args:
      program: its text, in which instructions of a computation stand in the order of their
        execution.

    Returns:
      The instructions of each computation in order. The computations are sorted, since they are not
      printed in an order that means anything.
    """
    computations: list[list[str]] = [[]]
    for line in program.splitlines():
        if line.endswith("{") and " = " not in line:
            computations.append([])
        elif (found := _INSTRUCTION.search(line)) and _communicates(found["opcode"], line):
            computations[-1].append(_described(found, line))
    return [line for computation in sorted(computations) for line in computation]


def _communicates(opcode: str, line: str) -> bool:
    return opcode != "custom-call" or _KERNEL.search(line) is not None


def _described(found: re.Match[str], line: str) -> str:
    opcode = "Mosaic kernel" if found["opcode"] == "custom-call" else found["opcode"]
    source = _SOURCE.search(line)
    origin = f"of {_NUMBERS.sub('', source[1])}" if source else ""
    words = opcode, _LAYOUT.sub("", found["shape"]), origin
    return " ".join(filter(None, words))
