"""Run the application: sockets, signals, and an end in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from diffusiongemma.errors import ConfigError
from diffusiongemma.serve import logs, startup
from diffusiongemma.serve.app import build_app
from diffusiongemma.serve.lifecycle import ServerState
from diffusiongemma.serve.protocol import limited
from diffusiongemma.serve.settings import Settings

SEND_BUFFER = 64 << 10


class Server(uvicorn.Server):
    """The first signal drains and ends the server, a second one ends it at once."""

    def __init__(self, settings: Settings, on_loaded: Callable[[], None] = lambda: None) -> None:
        self.state = ServerState(settings)
        self._on_loaded = on_loaded
        self._loop: asyncio.AbstractEventLoop | None = None
        app: Any = build_app(self.state, self._loaded)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host.strip("[]"),
                port=settings.port,
                http=limited(settings),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # who asks is not who says that he asks
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(settings.grace) + 5,
                h11_max_incomplete_event_size=settings.max_head,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def _loaded(self) -> None:
        self._on_loaded()
        if self.state.load_error is not None:
            self.stop()

    def stop(self) -> None:
        """From any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.state.drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.stop()


def bind(settings: Settings) -> socket.socket:
    """The listening socket; a port that is taken is a mistake of the user."""
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: a reader that does not read must be noticed, and costs the kernel this much at most.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        listener.bind((host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
    return listener


def run(settings: Settings) -> None:
    """Serve until a signal comes. A model that cannot be loaded raises its error."""
    server = Server(settings, startup.done)
    logs.set_up(settings.log_json, settings.log_file, server.state.metrics)
    listener = bind(settings)
    port = listener.getsockname()[1]
    host = f"[{settings.host.strip('[]')}]" if ":" in settings.host else settings.host
    print(f"serving {server.state.model_name} on http://{host}:{port}", flush=True)
    server.run(sockets=[listener])
    if server.state.load_error is not None:
        raise server.state.load_error
