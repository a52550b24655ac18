"""A process that reads a model with another one, and exports it: `python -m ... PORT NUMBER OUT`.

It prints the bytes that it read.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from models.generation import Generator
from models.generation.generator import make_mesh
from models.hugging_face import ModelFolder, load, write
from tests.models.hugging_face.folders import DATA


class Counting(ModelFolder):
    """Counts the bytes that are read of tensors."""

    count = 0

    def read(self, name: str, index: Any) -> np.ndarray:
        part = super().read(name, index)
        self.count += part.nbytes
        return part


def main(port: str, number: str, out: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    folder = Counting(DATA / "qwen2")
    generator = Generator(folder.config, mesh=make_mesh(2), dtype="float32")
    params = load(folder, generator.abstract_params)
    print(folder.count)
    write(out, generator.config, params, dtype="bfloat16")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
