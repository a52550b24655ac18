"""The process that renders templates: it is one, serves threads and forks, and ends."""

from __future__ import annotations

import datetime
import os
import select
import signal
import subprocess
import sys

import pytest

from models.hugging_face.chat import template_process
from models.hugging_face.chat.template_process import TemplateError, render

NOW = datetime.datetime(2000, 1, 31)

#: The module alone, without JAX: programs fork, and start soon.
PREAMBLE = f"""
import datetime, importlib.util, os, sys, threading
import multiprocessing

def module():
    spec = importlib.util.spec_from_file_location("template_process", {template_process.__file__!r})
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded

renderer = module()
NOW = datetime.datetime(2000, 1, 1)

def rendered(text):
    template = "{{{{ messages[0].content }}}}"
    return renderer.render(template, [{{"content": text}}], [(1, True)], {{}}, NOW)[0]

def worker():
    return renderer._process()._process.pid
"""


def run(program: str) -> str:
    command = [sys.executable, "-W", "error", "-c", PREAMBLE + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def ends(pid: int) -> bool:
    """Whether a process ends soon."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 20)[0])
    finally:
        os.close(handle)


def test_one_process_serves_all_templates():
    first = render("{{ a }}", [], [(0, False)], {"a": 1}, NOW)
    process = template_process._process()._process
    assert first == ["1"] and render("b{{ a }}", [], [(0, False), (0, True)], {}, NOW) == ["b", "b"]
    assert render("{{ a }}", [], [(0, False)], {"a": 2}, NOW) == ["2"]
    with pytest.raises(TemplateError, match="division"):
        render("{{ 1 / 0 }}", [], [(0, False)], {}, NOW)
    # What failed is not taken for what was compiled last.
    assert render("{{ a }}", [], [(0, False)], {"a": 3}, NOW) == ["3"]
    assert template_process._process()._process is process


def test_its_limits_are_those_of_the_operating_system():
    render("a", [], [(0, False)], {}, NOW)
    process = template_process._process()._process
    assert process is not None
    with open(f"/proc/{process.pid}/limits") as file:
        limits = {line[:25].strip(): line[26:].split()[:2] for line in file}
    assert limits["Max address space"] == [str(template_process.LIMIT_MEMORY_BYTES)] * 2
    assert limits["Max open files"] == ["3", "3"]
    for name in ("Max file size", "Max core file size", "Max processes"):
        assert limits[name] == ["0", "0"]
    assert os.path.realpath(f"/proc/{process.pid}/fd/2") == os.devnull
    assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]


def test_many_threads_get_their_own_answers():
    output = run("""
answers = []
def ask(n):
    answers.extend(rendered(str(k)) == str(k) for k in range(n, n + 50))
threads = [threading.Thread(target=ask, args=(100 * n,)) for n in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(answers), all(answers))
""")
    assert output == "400 True\n"


def test_a_fork_has_a_process_of_its_own():
    """Data loaders fork their workers like this, also while another thread is rendering."""
    output = run("""
print(rendered("a"))
mine = worker()
queue = multiprocessing.get_context("fork").Queue()
def ask():
    queue.put((rendered("b"), worker()))
process = multiprocessing.get_context("fork").Process(target=ask, daemon=True)
with renderer._process()._lock:
    process.start()
text, its_own = queue.get()
process.join()
print(text, its_own != mine, worker() == mine, rendered("c"))
""")
    assert output == "a\nb True True c\n"


def test_the_limit_of_time_holds_where_a_profiler_has_taken_its_signal():
    """Ignored and blocked signals are inherited."""
    output = run("""
import signal
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
renderer.LIMIT_SECONDS, renderer._WAIT_SECONDS = 0.1, 30
endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
try:
    renderer.render(endless, [], [(0, False)], {}, NOW)
except ValueError as error:
    print(error)
""")
    assert output == "it computes for more than 0.1 seconds\n"


def test_it_ends_with_a_parent_that_exits():
    assert ends(int(run('rendered("a"); print(worker())')))


def test_it_ends_with_a_parent_that_is_killed_though_a_fork_holds_the_pipe():
    program = """
rendered("a")
if os.fork() == 0:
    os.close(1); os.close(2)
    sys.stdin.read()
    os._exit(0)
print(worker(), flush=True)
os.kill(os.getpid(), 9)
"""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", PREAMBLE + program]
    try:
        done = subprocess.run(command, stdin=reader, stdout=subprocess.PIPE, timeout=60)
        assert done.returncode == -signal.SIGKILL
        assert ends(int(done.stdout))
    finally:
        # The fork reads its end.
        os.close(writer)
        os.close(reader)


def test_another_one_is_started_when_it_is_killed():
    render("a", [], [(0, False)], {}, NOW)
    process = template_process._process()._process
    assert process is not None
    process.kill()
    assert ends(process.pid)
    assert render("a", [], [(0, False)], {}, NOW) == ["a"]


def test_one_that_does_not_answer_is_ended(monkeypatch):
    render("a", [], [(0, False)], {}, NOW)
    process = template_process._process()._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(template_process, "_WAIT_SECONDS", -template_process.LIMIT_SECONDS)
    with pytest.raises(TemplateError, match="the process that renders it does not answer"):
        render("a", [], [], {}, NOW)
    monkeypatch.undo()
    assert process.poll() is not None
    assert render("a", [], [(0, False)], {}, NOW) == ["a"]


def test_an_interrupt_leaves_no_answer_behind(monkeypatch):
    process = template_process._process()

    def interrupt(count: int) -> bytearray:
        raise KeyboardInterrupt

    render("a", [], [(0, False)], {}, NOW)
    with monkeypatch.context() as patch:
        patch.setattr(process, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render("b", [], [(0, False)], {}, NOW)
    assert render("a", [], [(0, False)], {}, NOW) == ["a"]


def test_a_process_that_cannot_be_started_is_a_sentence(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(template_process, "_current", None)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(TemplateError, match=r"no process can be started .*\(Resource temp"):
        render("a", [], [], {}, NOW)


def test_a_large_conversation_passes():
    content = "ü" * 10**6
    assert render("{{ messages[0].content }}", [{"content": content}], [(1, True)], {}, NOW) == [
        content
    ]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: b'{"a": ' + b"[" * 10**6, "messages or variables are nested too deeply"),
        (lambda: b'{"a": [' + b'"", ' * 4 * 10**7, "needs more than 0.125 GiB of memory"),
    ],
)
def test_a_message_that_the_process_cannot_read_is_a_sentence(monkeypatch, make, sentence):
    monkeypatch.setattr(template_process, "LIMIT_MEMORY_BYTES", 2**27)
    monkeypatch.setattr(template_process, "_current", None)
    render("a", [], [], {}, NOW)
    content = make()
    monkeypatch.setattr(template_process, "_encoded", lambda message: content)
    with pytest.raises(TemplateError, match=sentence):
        render("a", [], [], {}, NOW)
