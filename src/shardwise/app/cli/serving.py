"""The command `serve`: the page with a form, on this machine alone."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from shardwise.app.cli.output import Output, print_notes
from shardwise.errors import ConfigError


def served(*, port: int, budget_s: float) -> Output:
    """Serves until it is interrupted. ConfigError without the extra `web`, and for a port in use."""
    if missing := [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"needs {' and '.join(missing)}, which is not installed", key="serve",
            allowed="after `pip install 'shardwise[web]'` "
            "or `pip install 'fastapi>=0.115,<1' 'uvicorn>=0.30,<1'`",
        )  # fmt: skip
    import uvicorn

    from shardwise.app.web.serve import HOST, application

    listener = _listener(HOST, port)
    own_port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(application(own_port, budget_s=budget_s), log_level="warning", access_log=False)
    )
    print_notes([f"shardwise: open http://{HOST}:{own_port}/ ; Ctrl-C ends it"])
    server.run(sockets=[listener])
    return Output()


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens on loopback, so that the address can be opened as soon as it is printed.
    ConfigError where the port is in use."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen()
    except OSError as error:
        found.close()
        raise ConfigError(
            "cannot be used", key="--port", found=f"{port}: {(error.strerror or str(error)).lower()}",
            allowed="a free port; 0 takes any",
        ) from None  # fmt: skip
    return found
