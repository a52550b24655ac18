"""Two processes each read a part of a model, and export what one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from models.hugging_face import ModelFolder
from tests.models.hugging_face.folders import DATA
from tests.models.hugging_face.test_writing import assert_same, contents
from tests.train.faults import ENVIRONMENT

ON_THE_CPU = {
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "XLA_FLAGS": "",
}


def test_two_processes_export_what_one_does(tmp_path):
    command = [sys.executable, "-m", "tests.models.hugging_face.two_processes"]
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("localhost", 0))
        port = str(reservation.getsockname()[1])
        processes = [
            subprocess.Popen(
                [*command, port, str(number), str(tmp_path / "out")],
                cwd=Path(__file__).parents[3],
                env=os.environ | ENVIRONMENT | ON_THE_CPU,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    original = ModelFolder(DATA / "qwen2")
    assert_same(ModelFolder(tmp_path / "out"), original)
    whole = sum(tensor.nbytes for tensor in contents(original).values())
    # Norms are read by both.
    for output in outputs:
        assert int(output.split()[-1]) < 0.52 * whole
