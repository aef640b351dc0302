"""An HTTP server for an ASGI application, in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from art_ray.errors import EngineError
from art_ray.serving.asgi import Application

__all__ = ["Listener", "bound_socket", "reserved_socket"]


class Listener:
    """Serves an application on one port.

    Args:
        app: the application.
        host: address to listen on; None: the one by which other machines reach this one.
        port: 0 takes a free one.
    """

    def __init__(self, app: Application, host: str | None, port: int = 0) -> None:
        self._app, self._host, self._port = app, host, port
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._url = ""

    async def start(self) -> str:
        """Starts to listen, once; returns the address without a path.

        Raises:
            EngineError: the address cannot be bound.
        """
        if self._serving is not None:
            return self._url
        import uvicorn

        sock = bound_socket(self._host, self._port)
        host, port = sock.getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        class Server(uvicorn.Server):
            """One that leaves the process's signals to their owner."""

            capture_signals = contextlib.nullcontext

        options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        self._server = Server(uvicorn.Config(self._app, interface="asgi3", **options))
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._serving.done():
                raise EngineError("the server ended while it started") from self._serving.exception()
            await asyncio.sleep(0.01)
        return self._url

    async def stop(self) -> None:
        """Closes the port; clients that are still being answered do not hold up the end."""
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=1.0)
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._server.force_exit = True
            await asyncio.wait([self._serving], timeout=5.0)


def reserved_socket(host: str) -> socket.socket:
    """Returns a socket that keeps a free port of `host` for a listener of ours, which may come, go and come again.

    It does not listen itself. Nobody else gets the port while it is open.

    Raises:
        EngineError: the address cannot be bound.
    """
    return _bound(host, 0, is_shared=True)


def bound_socket(host: str | None, port: int = 0) -> socket.socket:
    """Returns a socket bound to `host`; None: the address by which others reach this machine.

    Args:
        host: the address.
        port: one that somebody else keeps for us, bound but not listening; 0 takes a free one.

    Raises:
        EngineError: the address cannot be bound.
    """
    return _bound(host if host is not None else _own_address(), port, is_shared=port != 0)


def _bound(address: str, port: int, *, is_shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        raise EngineError(f"cannot listen on {address} port {port or '(any)'}: {error}") from error
    return sock


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it makes the kernel choose an address
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
