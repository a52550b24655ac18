"""How much memory of the host the reading of a large model takes: run by hand.

Writes a folder of zeros in the shape of a published model, reads it onto simulated devices in
bfloat16, and prints the peak of anonymous pages beyond the weights themselves::

    python -m tests.models.hugging_face.import_memory --preset llama3-8b --devices 2

The folder takes the weights' bytes on disk, and is deleted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import tempfile
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from models.config import LlamaConfig
from models.families import PRESETS, write_config
from models.hugging_face.folder import CONFIG, ModelFolder
from models.hugging_face.reading import load
from models.hugging_face.tensor_files import INDEX
from models.hugging_face.tensor_names import tensors


def write_zeros(folder: Path, config: LlamaConfig) -> None:
    """A folder of the model, with a file for each layer and one for all else."""
    (folder / CONFIG).write_text(json.dumps(write_config(config)))
    files: dict[str, dict[str, np.ndarray]] = {}
    for path, tensor in tensors(config):
        layer = re.match(r"layers\.(\d+)\.", path)
        file = f"model-{int(layer[1]) if layer else config.num_layers:05d}.safetensors"
        files.setdefault(file, {})[tensor.name] = np.zeros(tensor.shape, ml_dtypes.bfloat16)
    for file, contents in files.items():
        save_file(contents, folder / file)
    names = {name: file for file, contents in files.items() for name in contents}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def anonymous_bytes() -> int:
    """Bytes of this process that are no file's."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


class Peak:
    """The largest `anonymous_bytes` while it is entered, looked at every few milliseconds."""

    def __enter__(self) -> Peak:
        self.bytes, self._ended = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    from models.generation import Generator

    config = PRESETS[arguments.preset]()
    config = dataclasses.replace(config, num_layers=arguments.layers or config.num_layers)
    with tempfile.TemporaryDirectory() as name:
        write_zeros(Path(name), config)
        folder = ModelFolder(name)
        generator = Generator(folder.config, dtype="bfloat16")
        weights = sum(2 * math.prod(leaf.shape) for leaf in generator.abstract_params.values())
        before = anonymous_bytes()
        with Peak() as peak:
            params = load(folder, generator.abstract_params)
        held = sum(leaf.nbytes for leaf in params.values())
    assert held == weights
    print(
        f"{arguments.preset}, {config.num_layers} layers, {arguments.devices} devices:"
        f" {weights / 2**30:.2f} GiB of weights; peak of anonymous pages beyond them while they"
        f" are read: {(peak.bytes - before - weights) / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
