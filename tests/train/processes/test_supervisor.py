"""A parent says why its child ended, where the child could not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train.processes.shutdown import FORWARDED
from train.processes.supervisor import describe_end, is_one_of_several

# As jaxlib 0.10.2 to 0.12 print it.
FATAL = (
    "F1123 06:29:19.928248   23373 client.h:86] Terminating process because the JAX distributed"
    " service detected fatal errors. This most likely indicates that another task died; see the"
    " other task logs for more details. absl::Status: UNAVAILABLE: "
)
SILENT = FATAL + (
    "The following tasks are unhealthy (stopped sending heartbeats):\n{}\nThe tasks have crashed."
)
NO_COORDINATOR = FATAL + (
    "Failed to send RPC to coordination service. Either the leader task was preempted/died."
)
NOT_ALL_CAME = FATAL + "Deadline\n\nRPC: /xla.coordination.CoordinationService/RegisterTask"


@pytest.mark.parametrize(
    ("status", "last_words", "sentence"),
    [
        (-6, SILENT.format("1"), "process 1 has died, so this process was ended too; checkpoints"),
        (-6, SILENT.format("1, 3"), "processes 1, 3 have died, so"),
        # Python may exit from an error while a thread of JAX ends the process.
        (1, SILENT.format("1"), "process 1 has died, so"),
        (-6, NO_COORDINATOR, "process 0 has died, so"),
        (-6, NOT_ALL_CAME, "the processes did not find each other in time; check that all"),
        (-9, "", "this process was ended by SIGKILL, as by the kernel when memory runs out; the"),
        (-11, "", "this process was ended by SIGSEGV; the others will end too; checkpoints"),
    ],
)
def test_ends_that_a_child_cannot_explain(status, last_words, sentence):
    described = describe_end(status, last_words)
    assert described is not None
    assert described.startswith(sentence)


@pytest.mark.parametrize("status", [0, 1, 2, 130, 143])
def test_a_child_that_exits_needs_no_sentence(status):
    assert describe_end(status, "") is None


def test_who_gets_a_parent(monkeypatch):
    monkeypatch.delenv(FORWARDED, raising=False)
    assert not is_one_of_several(["--steps", "3"])
    assert is_one_of_several(["--steps", "3", "--distributed.process-id=1"])
    monkeypatch.setenv(FORWARDED, "5")
    assert not is_one_of_several(["--distributed.process-id=1"])


# A parent whose child, instead of the trainer, is the program in CHILD.
PARENT = """
import sys
from train.processes import supervisor

sys.orig_argv = [sys.executable, "-c", CHILD, *sys.argv[1:]]
sys.argv[0] = "-c"
sys.exit(supervisor.supervise([]))
"""


def start(child: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["env", "--default-signal=INT,TERM", sys.executable, "-c", f"CHILD = {child!r}\n{PARENT}"],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


LISTENING = """
import os, signal, sys, threading
from train.processes.shutdown import Shutdown

with Shutdown() as shutdown:
    shutdown.defer()
    # What a launcher sends to the whole group reaches parent and child.
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    print("ready", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_child_gets_each_signal_once_through_its_parent(name: str) -> None:
    number = signal.Signals[name]
    with start(LISTENING) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(number)
        first = parent.stderr.readline()
        assert first == f"{name}: finishing the step and saving; a second signal stops at once\n"
        parent.send_signal(number)
        assert parent.wait(timeout=60) == 128 + number
        assert parent.stderr.readline().startswith(f"{name}: stopped at once, the save that was")


def test_a_child_ends_with_its_parent() -> None:
    with start(LISTENING) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == ""  # Closed by the end of the child.


DYING = f"""
import os, sys
sys.stderr.write("a warning\\n" + {SILENT.format("1")!r})
sys.stderr.flush()
os.abort()
"""


def test_the_trace_of_a_child_that_is_ended_gives_way_to_a_sentence() -> None:
    with start(DYING) as parent:
        assert parent.stderr is not None
        printed = parent.stderr.read()
        assert parent.wait(timeout=60) == 128 + signal.SIGABRT
    assert printed.startswith("a warning\nerror: process 1 has died, so this process was ended")
    assert printed.endswith("start all processes again, with --resume if there are any\n")
    assert len(printed.splitlines()) == 2
