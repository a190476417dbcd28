"""Other processes of this machine: waiting for one, telling whether it still lives, and which one started this.

A lock is the kernel's, on a file, and is released when its holder dies. Not every file system has them, and those that
do may not show them to other hosts: a lock only saves work done twice, and whatever is written under one must be right
without it.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NOTIFY_AFTER_S = 5.0


@contextlib.contextmanager
def locked(path: Path, work: str, notify_after_s: float = NOTIFY_AFTER_S) -> Iterator[None]:
    """Hold an exclusive lock on `path`; where the file system has no locks, hold nothing.

    The file stays: removing it would let two holders in.

    Args:
        path: file of the lock, created if it is missing.
        work: what its holder does, to name in the line about a long wait.
        notify_after_s: a longer wait is reported on stderr, once.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "a"))
            told_at_s = time.monotonic() + notify_after_s
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= told_at_s:
                        print(f"waiting for another process to {work} ({path.parent})", file=sys.stderr, flush=True)
                        told_at_s = float("inf")
                    time.sleep(0.05)
        yield


def machine_name() -> str:
    """A short name of what gives process ids their meaning: this machine since it started, or one container of it."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def launcher_name() -> str:
    """A name of the process that started this one; the same for a rank that it starts again."""
    return f"{machine_name()}-{os.getppid()}"


def restart_count() -> int:
    """How often the launcher of this process, torchrun or ours, has started the run again."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def is_gone(machine: str, process_id: int) -> bool:
    """Whether a process of this machine has certainly ended; False for one of another machine."""
    if machine != machine_name() or process_id < 1:
        return False
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
