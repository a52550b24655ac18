"""Uses a folder that anyone may have written, and watches which files are opened."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from models.families import write_config
from models.hugging_face import ModelFolder
from models.layers.rotary import frequencies
from tests.models.hugging_face.tiny_folders import FOLDERS

SECONDS = 5
GENERATION = "generation_config.json"

_watched: list[list[str]] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], (str, bytes)):
        _watched[-1].append(os.fsdecode(arguments[0]))


# A hook cannot be removed. It looks at a list.
sys.addaudithook(_watch)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The paths that Python and safetensors open."""
    opened: list[str] = []
    real = safetensors.safe_open

    def recording(path: Any, *arguments: Any) -> Any:
        opened.append(os.fspath(path))
        return real(path, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(safetensors, "safe_open", recording)
        _watched.append(opened)
        try:
            yield opened
        finally:
            _watched.pop()


def use(folder: Path) -> None:
    """All that reads a folder of unknown origin before its tensors are read."""
    read = ModelFolder(folder)
    write_config(read.config)
    assert np.all(np.isfinite(frequencies(read.config)))
    assert all(isinstance(token, int) for token in read.stop_tokens)
    assert read.dtypes[""] in ("bfloat16", "float16", "float32")


def check(change: Callable[[Path], Any]) -> str:
    """Makes a folder and uses it. Returns the sentence, or nothing if the folder is usable."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(os.path.realpath(scratch))
        # Files that would be read if a name or a link led out.
        FOLDERS["whole"](root / "outside")
        change(root / "model")
        sentence = ""
        with opened_files() as opened:
            # Of the processor, since this machine may be busy. What waits for ever is seen too.
            began = time.thread_time()
            try:
                use(root / "model")
            except ValueError as error:
                sentence = str(error)
            seconds = time.thread_time() - began
        outside = [path for path in opened if not Path(path).is_relative_to(root / "model")]
        assert not outside
        assert seconds < SECONDS
        if sentence:
            assert sentence.startswith(str(root / "model"))
            sentence.encode()
            assert sentence.isprintable()
            assert len(sentence) < 1500
        return sentence


def shards(folder: Path) -> None:
    FOLDERS["shards"](folder)
    (folder / GENERATION).write_text(json.dumps({"eos_token_id": [1, 2]}))
