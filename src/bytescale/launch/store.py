"""Where local ranks meet: a key-value store on the loopback interface, in a process that survives any rank."""

import contextlib
import signal
import socket
from collections.abc import Iterator

from bytescale.launch.child import start_child
from bytescale.launch.signals import ending_signals

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def rendezvous() -> Iterator[dict[str, str]]:
    """Serve a store for as long as the block lasts. Yields the variables by which ranks find it.

    The port is bound here before anyone learns of it, so that no other program can take it. torch is imported before.
    """
    with socket.create_server((_LOOPBACK, 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        server = start_child(lambda: _serve(listener, port), signals=ending_signals())
    try:
        yield {
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
            # As below torchrun: the store is there already, rank 0 must not open one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **_loopback_transport(),
        }
    finally:
        server.kill()


def _serve(listener: socket.socket, port: int) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store is not None:
        signal.pause()


def _loopback_transport() -> dict[str, str]:
    """Sockets of gloo on the loopback interface too, where it has the name that it has on Linux."""
    names = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names else {}
