"""Processes that tests start, and their ends."""

from __future__ import annotations

import contextlib
import os
import select
import traceback
from collections.abc import Callable

__all__ = ["has_exited", "in_child", "wait_for_exit"]


def in_child(call: Callable[[], object]) -> int:
    """Run *call* in a forked process, which exits with 1 if it raises; give its pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def has_exited(pid: int, *, within: float = 0) -> bool:
    """Whether *pid*, which may be any process, has exited, be it a zombie or gone. *within* is in seconds."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            return bool(select.select([pidfd], [], [], within)[0])
        finally:
            os.close(pidfd)
    return True


def wait_for_exit(pid: int) -> None:
    """Wait until *pid* has exited."""
    assert has_exited(pid, within=30), f"process {pid} does not exit"
