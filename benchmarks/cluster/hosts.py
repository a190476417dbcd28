"""Hosts on one machine that keep the time of separate ones: `cluster` makes them and takes them down whatever happens.

A host is a network namespace on a common bridge, its link shaped to a rate in both directions, and a control group that
holds it to a share of one core: the idle time of a host is never another's compute, so imbalance, waiting and exposed
communication show in wall time. The shares together must stay below the cores there are.

Names carry the pid of the process that made them. What a killed process left is removed by the next one; processes of a
host die with their parent. Needs root, iproute2 and the controllers `cpu` and `memory` of control groups (version 1).
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bytescale.errors import RunError, UserError

_GROUPS = Path("/sys/fs/cgroup")
_NAMESPACES = Path("/run/netns")
_PERIOD_US = 10_000
_KILL_PATIENCE_S = 10.0
_NAME = re.compile(r"bytescale-(\d+)-(\d+|bridge)")
_CLONE_NEWNET, _CLONE_NEWUTS, _SET_PARENT_DEATH_SIGNAL = 0x40000000, 0x04000000, 1


@dataclass(frozen=True)
class Host:
    """One host: its number, and the names of its namespace, groups, interface and address."""

    index: int
    name: str

    @property
    def interface(self) -> str:
        return f"a{self.index}"

    @property
    def address(self) -> str:
        return f"10.99.{self.index // 250}.{self.index % 250 + 1}"

    def limit_cpu(self, share: float) -> None:
        """Hold the host to `share` of one core, from now on."""
        _write(_GROUPS / "cpu" / self.name / "cpu.cfs_quota_us", round(share * _PERIOD_US))

    def enter(self) -> None:
        """Make this process, which must have one thread, a process of the host; it ends with its parent."""
        for controller in ("cpu", "memory"):
            _write(_GROUPS / controller / self.name / "cgroup.procs", os.getpid())
        libc = ctypes.CDLL(None, use_errno=True)
        handle = os.open(_NAMESPACES / self.name, os.O_RDONLY)
        failed = libc.setns(handle, _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS)
        failed = failed or libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.close(handle)
        if failed:
            raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        name = f"host{self.index}".encode()
        libc.sethostname(name, len(name))


@contextmanager
def cluster(num_hosts: int, link_rate: str, memory_bytes: int | None = None) -> Iterator[tuple[Host, ...]]:
    """`num_hosts` hosts, at full speed until `Host.limit_cpu`; gone when the block ends, with their processes.

    Args:
        num_hosts: how many.
        link_rate: of each link and direction, in the words of `tc`, e.g. "40mbit".
        memory_bytes: most memory of a host; more ends its process. None for no limit.

    Raises:
        UserError: the machine cannot have them; says what is missing.
    """
    if missing := what_is_missing():
        raise UserError(f"benchmarks.cluster cannot make hosts here: {missing}")
    remove_leftovers()
    hosts = tuple(Host(i, f"bytescale-{os.getpid()}-{i}") for i in range(num_hosts))
    bridge = f"bytescale-{os.getpid()}-bridge"
    try:
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for host in hosts:
            _make(host, bridge, link_rate, memory_bytes)
        yield hosts
    finally:
        _remove([*(host.name for host in hosts), bridge])


def what_is_missing() -> str | None:
    """What keeps this machine from having hosts, in one line; None where nothing does."""
    if os.geteuid() != 0:
        return "it takes root, to make network namespaces and control groups"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"there is no command {command} (Debian: apt-get install iproute2)"
    for controller, file in (("cpu", "cpu.cfs_quota_us"), ("memory", "memory.limit_in_bytes")):
        if not (_GROUPS / controller / file).exists() and not (_GROUPS / controller / "cgroup.procs").exists():
            return f"control groups of version 1 have no controller {controller} at {_GROUPS / controller}"
        if not os.access(_GROUPS / controller, os.W_OK):
            return f"{_GROUPS / controller} is read-only"
    return None


def remove_leftovers() -> None:
    """Remove what processes that are gone have left."""
    names = {path.name for place in _places() if place.exists() for path in place.iterdir()}
    found = [(name, match) for name in names if (match := _NAME.fullmatch(name))]
    _remove(name for name, match in found if not Path(f"/proc/{match[1]}").exists())


def _places() -> tuple[Path, ...]:
    return (_NAMESPACES, _GROUPS / "cpu", _GROUPS / "memory")


def _make(host: Host, bridge: str, link_rate: str, memory_bytes: int | None) -> None:
    for controller in ("cpu", "memory"):
        (_GROUPS / controller / host.name).mkdir()
    _write(_GROUPS / "cpu" / host.name / "cpu.cfs_period_us", _PERIOD_US)
    if memory_bytes is not None:
        _write(_GROUPS / "memory" / host.name / "memory.limit_in_bytes", memory_bytes)
    near, far = host.interface, f"b{host.index}"
    _run("ip", "netns", "add", host.name)
    _run("ip", "link", "add", near, "netns", host.name, "type", "veth", "peer", "name", far, "netns", bridge)
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/16", "dev", near)
    _run("ip", "-n", bridge, "link", "set", far, "master", "br0")
    for space, device in ((host.name, near), (host.name, "lo"), (bridge, far)):
        _run("ip", "-n", space, "link", "set", device, "up")
    for space, device in ((host.name, near), (bridge, far)):
        # A small burst: messages below it would travel at no cost.
        shape = f"qdisc add dev {device} root tbf rate {link_rate} burst 32kb latency 200ms"
        _run("tc", "-n", space, *shape.split())


def _remove(names: Iterator[str] | Sequence[str]) -> None:
    for name in names:
        _kill(name)
        with suppress(subprocess.CalledProcessError, RunError):
            _run("ip", "netns", "del", name)
        for controller in ("cpu", "memory"):
            with suppress(FileNotFoundError):
                (_GROUPS / controller / name).rmdir()


def _kill(name: str) -> None:
    """End every process of a host; a group with processes cannot be removed."""
    give_up_s = time.monotonic() + _KILL_PATIENCE_S
    while time.monotonic() < give_up_s:
        pids = set()
        for controller in ("cpu", "memory"):
            with suppress(OSError):
                pids |= {int(word) for word in (_GROUPS / controller / name / "cgroup.procs").read_text().split()}
        for pid in pids - {os.getpid()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not pids:
            return
        time.sleep(0.05)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))
