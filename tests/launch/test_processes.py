"""The one launcher: what processes send, how they end, why they failed; and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from evener.launch.parent import Parent
from evener.launch.processes import RANK_MODULES, LocalProcess, LocalProcesses
from evener.records.errors import EvenerError, InvalidInput, NodeLost
from evener.system import process_exit

LIMIT = 30.0
STARTER = """
import sys, time
from evener.launch.processes import LocalProcesses
from test_processes import wait_for_ever
if __name__ == "__main__":
    with LocalProcesses([]) as processes:
        print(processes.start("child", wait_for_ever).process.pid, flush=True)
        time.sleep(60)
"""


def send_twice(parent: Parent, word: str) -> None:
    """A process that says something."""
    parent.send(word.encode())
    parent.send(b"end")


def fail(_parent: Parent, error: Exception) -> None:
    """A process that fails."""
    raise error


def kill_itself(_parent: Parent) -> None:
    """A process that dies without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave_threads(_parent: Parent, file: Path) -> None:
    """A process with a thread that works for a moment after the function has returned, and an idle pool."""
    idle = ThreadPoolExecutor()
    idle.submit(int).result()
    threading.Timer(0.3, file.write_text, ("written",)).start()


def leave_a_thread_for_ever(_parent: Parent, errors: Path) -> None:
    """A process with a thread that never ends."""
    sys.stderr = errors.open("w")
    process_exit._THREADS_SECONDS = 0.5
    threading.Thread(target=threading.Event().wait, name="prefetcher").start()


def wait_for_ever(_parent: Parent) -> None:
    """A process that has to be ended."""
    while True:
        time.sleep(1)


def start_a_worker(parent: Parent) -> None:
    """A process that starts a worker as a DataLoader does, with a data set that cannot be pickled."""
    from torch.utils.data import DataLoader

    class Squares(list[int]):
        pass

    loader: Any = DataLoader(cast(Any, Squares(range(4))), num_workers=1, collate_fn=lambda batch: batch[0] ** 2)
    parent.send(repr((multiprocessing.get_start_method(), list(loader))).encode())


def send_place(parent: Parent) -> None:
    """A process that says where it runs, and with how many threads."""
    import torch

    parent.send(repr((sorted(os.sched_getaffinity(0)), torch.get_num_threads())).encode())


def end_from_a_thread(parent: Parent) -> None:
    """A process whose main thread hangs while another one ends it."""
    threading.Thread(target=lambda: parent.end(NodeLost("rank 1 is silent")), daemon=True).start()
    wait_for_ever(parent)


def until(processes: LocalProcesses, condition: Callable[[], bool]) -> list[bytes]:
    """What came until `condition` held."""
    found, end = [], time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        found += [data for _, data in processes.receive(0.1)]
    return found


def wait(processes: LocalProcesses) -> list[bytes]:
    """The first of what comes."""
    end = time.monotonic() + LIMIT
    while not (found := [data for _, data in processes.receive(0.1)]):
        assert time.monotonic() < end
    return found


def outcome(target: Callable[..., None], *arguments: object) -> tuple[LocalProcess, list[bytes], str]:
    """A process at its end, what it sent, and how it ended in words."""
    with LocalProcesses([]) as processes:
        one = processes.start("node-0", target, *arguments)
        found = until(processes, lambda: one.has_ended and one.is_drained)
        return one, found, one.ending


def test_messages_of_a_process_arrive_in_order_with_its_end() -> None:
    one, found, ending = outcome(send_twice, "hello")
    assert found == [b"hello", b"end"]
    assert one.has_finished
    assert one.failure is None
    assert ending == "ended with exit code 0"


def test_threads_of_a_process_end_before_it(tmp_path: Path) -> None:
    one, _, ending = outcome(leave_threads, tmp_path / "file")
    assert one.has_finished
    assert ending == "ended with exit code 0"
    assert (tmp_path / "file").read_text() == "written"


def test_thread_that_never_ends_is_named_and_ended(tmp_path: Path) -> None:
    one, _, ending = outcome(leave_a_thread_for_ever, tmp_path / "errors")
    assert one.has_finished
    assert ending == "ended with exit code 0"
    assert "prefetcher" in (tmp_path / "errors").read_text()


def test_user_error_arrives_with_sentence_and_exit_code() -> None:
    one, _, ending = outcome(fail, InvalidInput("no such task"))
    assert one.failure is not None
    assert (one.failure.sentence, one.failure.traceback) == ("no such task", "")
    assert type(one.failure.as_error()) is InvalidInput
    assert one.failure.is_own
    assert ending == "ended with exit code 2"


def test_bug_arrives_with_a_traceback_printed_when_raised(capsys: pytest.CaptureFixture[str]) -> None:
    one, _, _ = outcome(fail, KeyError("x"))
    assert one.failure is not None
    error = one.failure.as_error()
    assert str(error) == "KeyError: 'x'"
    assert type(error) is EvenerError
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "in fail" in printed


def test_lost_connection_is_not_the_own_failure_of_a_process() -> None:
    one, _, _ = outcome(fail, NodeLost("rank 1 is gone"))
    assert one.failure is not None
    assert not one.failure.is_own


def test_another_thread_can_end_a_hanging_process() -> None:
    one, _, ending = outcome(end_from_a_thread)
    assert one.failure is not None
    assert one.failure.sentence == "rank 1 is silent"
    assert ending == "ended with exit code 4"


def test_killed_process_has_failed_with_its_signal() -> None:
    with LocalProcesses([]) as processes:
        one = processes.start("node-0", kill_itself)
        until(processes, lambda: one.has_ended and one.is_drained)
        assert one.has_failed
        assert one.failure is None
        assert one.ending == "was killed by signal 9 (SIGKILL)"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux alone")
def test_process_has_its_assigned_cores_and_threads() -> None:
    core = min(os.sched_getaffinity(0))
    with LocalProcesses([]) as processes:
        one = processes.start("node-0", send_place, cores=[core], threads=1)
        assert until(processes, lambda: one.has_ended and one.is_drained) == [repr(([core], 1)).encode()]


def test_all_processes_end_when_the_block_raises() -> None:
    pids = list[int | None]()

    def start_and_fail() -> None:
        with LocalProcesses([]) as processes:
            pids.extend(processes.start(f"node-{i}", wait_for_ever).process.pid for i in range(2))
            raise InvalidInput("enough")

    with pytest.raises(InvalidInput):
        start_and_fail()
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids if pid is not None)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_process_ends_when_its_starter_is_killed(is_frozen: bool) -> None:
    if is_frozen and sys.platform != "linux":
        pytest.skip("the kernel ends what is frozen on Linux alone")
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    with starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        others = psutil.Process(starter.pid).children(recursive=True)  # the fork server and the resource tracker
        assert child in [one.pid for one in others]
        if is_frozen:
            os.kill(child, signal.SIGSTOP)
        starter.kill()
    _, left = psutil.wait_procs(others, LIMIT)
    for one in left:
        one.kill()
    assert left == []


def stop_when_asked(parent: Parent) -> None:
    """A process that ends well when it is asked to."""
    asked = list[bool]()
    parent.on_stop(lambda: asked.append(True))
    parent.send(b"ready")
    while not asked:
        time.sleep(0.05)
    parent.send(b"asked")


@pytest.mark.skipif(sys.platform != "linux", reason="the socket is reached by its descriptor on Linux")
def test_killed_starter_leaves_no_files(tmp_path: Path) -> None:
    file = tmp_path / "starter.py"
    file.write_text(STARTER)
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # short: a socket's path has at most 107 bytes
        paths = {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}", "TMPDIR": temporary}
        with subprocess.Popen(
            [sys.executable, str(file)], stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}
        ) as starter:
            assert starter.stdout is not None
            assert starter.stdout.readline().strip().isdecimal()
            starter.kill()
        assert os.listdir(temporary) == []


@pytest.mark.parametrize("signals_first", [False, True], ids=["asked", "all get the signal"])
def test_process_asked_to_stop_ends_successfully(signals_first: bool) -> None:
    with LocalProcesses([]) as processes:
        one = processes.start("node-0", stop_when_asked)
        assert wait(processes) == [b"ready"]
        if signals_first:  # as of a service manager, which tells this process at the same time
            assert one.process.pid is not None
            os.kill(one.process.pid, signal.SIGTERM)
            time.sleep(0.3)
        one.request_stop()
        assert until(processes, lambda: one.has_ended and one.is_drained) == [b"asked"]
        assert one.has_finished


def test_process_ended_by_an_external_sigterm_has_failed() -> None:
    with LocalProcesses([]) as processes:
        one = processes.start("node-0", stop_when_asked)
        assert wait(processes) == [b"ready"]
        assert one.process.pid is not None
        os.kill(one.process.pid, signal.SIGTERM)
        assert until(processes, lambda: one.has_ended and one.is_drained) == []
        assert (one.has_failed, one.failure) == (True, None)
        assert one.ending == "was killed by signal 15 (SIGTERM)"


def test_process_may_carry_on_after_a_sigterm_to_all_and_stops_later() -> None:
    with LocalProcesses([]) as processes:
        one = processes.start("node-0", stop_when_asked)
        assert wait(processes) == [b"ready"]
        assert one.process.pid is not None
        for _ in range(2):
            os.kill(one.process.pid, signal.SIGTERM)
            one.carry_on()
            time.sleep(0.3)
            assert not one.has_ended
        one.request_stop()
        assert until(processes, lambda: one.has_ended and one.is_drained) == [b"asked"]
        assert one.has_finished


def test_sigterm_to_the_server_ends_no_process() -> None:
    server: Any = forkserver._forkserver
    with suppress(PermissionError):  # the socket may have no file
        server._stop()  # an earlier test may have started one in another way
    with LocalProcesses(RANK_MODULES) as processes:  # ranks of later tests are forked from it, too
        one = processes.start("node-0", stop_when_asked)
        assert wait(processes) == [b"ready"]
        os.kill(psutil.Process(one.process.pid).ppid(), signal.SIGTERM)
        time.sleep(0.3)
        assert not one.has_ended
        one.request_stop()
        assert until(processes, lambda: one.has_ended and one.is_drained) == [b"asked"]
        assert one.has_finished


def say_much(parent: Parent) -> None:
    """Many words, and no more."""
    for number in range(50):
        parent.say(b"%d" % number)
        parent.send(b"%d" % number)


def test_all_messages_of_an_ended_process_are_read_at_once() -> None:
    with LocalProcesses([]) as processes:
        one = processes.start("one", say_much)
        one.process.join()
        found = processes.receive(1.0)
        assert [data for _, data in found] == list(one.said) == [b"%d" % number for number in range(50)]
        assert one.has_finished
        assert one.is_drained


def call_first(parent: Parent, order: tuple[Callable[[Parent], None]]) -> None:
    """Run what is deep in the order."""
    order[0](parent)


def send_word(parent: Parent, word: str) -> None:
    """Say what a program's own class stands for."""
    parent.send(word.encode())


PROGRAM = """
from functools import partial

from evener.launch.processes import LocalProcesses
from test_processes import call_first, send_word

class Word(str):
    pass

def work(parent, word):
    parent.send(word.encode())

if __name__ == "__main__":
    with LocalProcesses([]) as processes:
        processes.start("one", WORDS)
        print(next(data for _ in range(100) for _, data in processes.receive(0.1)))
"""


@pytest.mark.parametrize(
    "words",
    [
        "work, 'done'",
        "partial(work, word='done')",
        "call_first, (partial(work, word='done'),)",
        "send_word, Word('done')",
    ],
)
def test_function_of_the_main_program_can_run_in_a_process(words: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("WORDS", words))
    command = [sys.executable, "program.py"]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "b'done'\n", done.stderr


def test_workers_of_a_process_use_the_default_start_method() -> None:
    usual = subprocess.run(
        [sys.executable, "-c", "import multiprocessing; print(multiprocessing.get_start_method())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if usual != "fork":
        pytest.skip("only a fork starts what cannot be pickled")
    one, sent, _ = outcome(start_a_worker)
    assert one.failure is None
    assert sent == [repr(("fork", [0, 1, 4, 9])).encode()]
