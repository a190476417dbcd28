"""Processes of the command line that start at once: forked from one server that has imported torch for all tests.

They are what `python -m bytescale` is, imports apart: arguments, environment, streams and signals of their own, and
nothing of the test process. A few tests start the real command, see `tests/test_cli.py`.
"""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "bytescale.cli",
    "bytescale.profiler.session",
    "bytescale.train.trainer",
]


def preloaded() -> ForkServerContext:
    """Where processes with torch come from; one server a session."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def do_nothing() -> None:
    pass


class CommandProcess:
    """`bytescale WORDS` as a process, in the manner of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[object], environment: Mapping[str, str], before: Callable[[], None] = do_nothing
    ) -> None:
        """Begin.

        Args:
            words: after `bytescale`.
            environment: all of its variables.
            before: called in the process before the command; must be importable. What it patches holds in ranks too.
        """
        directory = Path(tempfile.mkdtemp())
        self._streams = directory / "stdout", directory / "stderr"
        arguments = ([str(word) for word in words], dict(environment), os.getcwd(), self._streams, before)
        self._process = preloaded().Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("bytescale", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Standard output and standard error, once it has ended."""
        self.wait(timeout)
        out, errors = (path.read_text() for path in self._streams)
        return out, errors

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run_command(
    words: Sequence[object],
    environment: Mapping[str, str],
    timeout_s: float,
    before: Callable[[], None] = do_nothing,
) -> subprocess.CompletedProcess[str]:
    """`bytescale WORDS`, run to its end."""
    process = CommandProcess(words, environment, before)
    try:
        out, errors = process.communicate(timeout_s)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(map(str, words)), process.returncode, out, errors)


def _run(
    words: list[str],
    environment: dict[str, str],
    directory: str,
    streams: tuple[Path, Path],
    before: Callable[[], None],
) -> None:
    for fd, path in zip((1, 2), streams, strict=True):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, fd)
        os.close(handle)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before()
    from bytescale import cli

    code = cli.main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
