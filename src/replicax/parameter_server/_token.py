"""The token with which the processes of a Ray cluster know each other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from replicax.errors import ClusterError
from replicax.parameter_server._library import use_tokens

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def require_token(*, may_make: bool) -> None:
    """Make sure that there is a token, and that Ray uses it.

    Ray listens on all interfaces, and a process that is let in can run code. So clusters that
    replicax starts always ask for the token.

    Args:
      may_make: Whether to make a token, in Ray's own file, if there is none. A process that joins
        a cluster of another machine cannot: its token would be a different one.
    """
    mode = os.environ.get(_MODE, "token")
    if mode.lower() != "token":
        raise ClusterError(
            f"Parameter servers need Ray's token authentication; got {_MODE}={mode!r} in the "
            f"environment. Unset {_MODE}, or set it to 'token'."
        )
    use_tokens()
    path = Path(os.environ.get(_PATH) or Path.home() / ".ray" / "auth_token")
    if os.environ.get(_TOKEN) or _has_text(path):
        return
    if not may_make:
        raise ClusterError(
            f"There is no token for the Ray cluster of the chief: neither {_TOKEN} in the "
            f"environment nor the file {path}. Copy that file from the chief's machine, where it "
            f"is made when the strategy is, or set {_TOKEN} to the same value everywhere."
        )
    _make(path)


def _has_text(path: Path) -> bool:
    return path.is_file() and bool(path.read_text().strip())


def _make(path: Path) -> None:
    """Write a new token, whole and for this user only; keep that of another process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(temporary, path)
        except FileExistsError:
            if not _has_text(path):  # an empty file, which Ray would refuse
                temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
