"""The daemon, but it kills itself at a chosen point of a chosen handler: `python -m tests.crashing_daemon TRAP ...`.

TRAP is a file that a test writes: "<handler> <point> <how many calls to let pass>". The daemon that comes to the point
removes the file, so a test knows whether it was reached. Points: `before` the work of the handler, `unjournaled` after
the work and before the journal tells of it, `after` both and before the answer.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from ucmfs import daemon
from ucmfs.fuse.operations import Operations
from ucmfs.launch import serve

TRAP = sys.argv[1]
_armed = False


def _reached(handler: str, point: str) -> bool:
    try:
        with open(TRAP) as file:
            name, at, passed = file.read().split()
    except (FileNotFoundError, ValueError):
        return False
    if (name, at) != (handler, point):
        return False
    if int(passed):
        with open(TRAP + ".new", "w") as file:
            file.write(f"{name} {at} {int(passed) - 1}")
        os.rename(TRAP + ".new", TRAP)
        return False
    return True


def _die() -> None:
    os.unlink(TRAP)
    os.kill(os.getpid(), signal.SIGKILL)


def _trapped(name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        global _armed
        if _reached(name, "before"):
            _die()
        if _reached(name, "unjournaled"):
            _armed = True
        try:
            return await method(*args, **kwargs)
        finally:
            if _reached(name, "after"):
                _die()

    return wrapped


def _trapped_commit(self: Operations) -> None:
    if _armed:
        _die()
    _commit(self)


_commit = Operations.commit
HANDLERS = (
    *("lookup", "getattr", "setattr", "getxattr", "setxattr", "removexattr", "mkdir", "rmdir", "opendir", "readdir"),
    *("releasedir", "create", "mknod", "open", "read", "write", "flush", "release", "fsync", "unlink", "rename"),
)

if __name__ == "__main__":
    for handler in HANDLERS:
        setattr(Operations, handler, _trapped(handler, getattr(Operations, handler)))
    Operations.commit = _trapped_commit  # type: ignore[method-assign]
    serve(daemon.run, sys.argv[2:])
