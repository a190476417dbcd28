"""The first signal asks, the second ends; what was ignored stays ignored; a wait inside a library does not matter."""

import math
import signal
import subprocess
import sys
import time

import pytest

from bytescale.config.schema import TrainConfig
from bytescale.train.measure.metrics import Agreed


def agreed(loss: float, num_skipped: int = 0, signal_number: int = 0) -> Agreed:
    return Agreed(7, loss, 1.0, signal_number, num_skipped)


def test_a_run_skips_so_many_steps_in_a_row_and_no_more() -> None:
    skip, stop = TrainConfig(on_nonfinite="skip", max_skipped_steps=2), TrainConfig()
    assert not agreed(1.0).ends_run(stop) and agreed(1.0, signal_number=15).ends_run(stop)
    assert agreed(math.inf, 1).ends_run(stop)
    assert not agreed(math.inf, 2).ends_run(skip)
    failure = agreed(math.inf, 3).failure(skip)
    assert failure is not None
    assert failure.startswith(
        "step 7: the loss is inf for 3 steps (train.max_skipped_steps = 2), training has diverged"
    )


WAITING = """
import ctypes, signal, sys, time
if "ignored" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from bytescale.train.stopping import stop_request
before = signal.getsignal(signal.SIGTERM)
with stop_request() as request:
    print("ready", flush=True)
    if "inside" in sys.argv:
        libc = ctypes.CDLL(None)
        while True:
            libc.sleep(3600)  # no Python runs here, and an interrupted sleep is begun again
    end = time.monotonic() + 60
    while not request.signal_number and time.monotonic() < end:
        time.sleep(0.01)
    print("asked by", request.signal_number, flush=True)
assert signal.getsignal(signal.SIGTERM) is before
"""


def start(*words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WAITING, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number: int) -> None:
    process = start()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == (f"asked by {number}\n", 0)


def test_the_second_signal_ends_at_once_even_inside_a_library() -> None:
    process = start("inside")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.communicate()


def test_what_was_ignored_stays_ignored() -> None:
    process = start("ignored")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == (f"asked by {int(signal.SIGTERM)}\n", 0)
