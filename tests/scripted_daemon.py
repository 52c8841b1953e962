"""A daemon with a script in place of a pipeline: `python -m tests.scripted_daemon SCRIPT ...`.

What a script sees goes into `facts`, beside the mount point, for the test to read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyfuse3
import trio

from ucmfs.errors import ConfigError, MountError, StageFull, sole_error
from ucmfs.fuse.link import Link
from ucmfs.launch import Launch, serve

Ready = Callable[[], None]
log = logging.getLogger("ucmfs.test")


class EmptyRoot(pyfuse3.Operations):
    """A file system of one empty directory, made by the same library as the real one."""

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = inode
        attributes.st_mode = stat.S_IFDIR | 0o755
        return attributes


def facts(launch: Launch) -> Path:
    return Path(launch.mount_point).parent / "facts"


def hang() -> None:
    signal.alarm(60)  # for the day that nothing kills it
    signal.pause()


def empty(launch: Launch, link: Link, ready: Ready) -> None:
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(200) if os.path.exists(f"/proc/self/fd/{fd}")]
    session = (os.getpid(), os.getppid(), os.getsid(0), os.getcwd())
    options = ",".join(sorted(launch.options))
    lines = [*map(str, session), options, launch.section.store_pipeline, *open_files]
    facts(launch).write_text("\n".join(lines))
    log.info("a line")
    os.write(2, b"words of a library\n")

    async def serve() -> None:
        # The relay ends it with the socket.
        with contextlib.suppress(OSError):
            try:
                await pyfuse3.main()
            except BaseExceptionGroup as group:
                raise sole_error(group) from None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.listen, lambda gone: None)
            nursery.start_soon(serve)
            link.ready(10)
            ready()

    pyfuse3.init(EmptyRoot(), link.messages, set())
    trio.run(main)
    pyfuse3.close(unmount=False)
    facts(launch).unlink()


def bad_configuration(launch: Launch, link: Link, ready: Ready) -> None:
    raise ConfigError("no such directory", path="storage_backends")


def refused(launch: Launch, link: Link, ready: Ready) -> None:
    os.write(2, b"fuse: device not found\n")
    raise MountError("the kernel refused", code=errno.ENODEV)


def full(launch: Launch, link: Link, ready: Ready) -> None:
    raise StageFull("Posix", "no room")


def unexpected(launch: Launch, link: Link, ready: Ready) -> None:
    raise ZeroDivisionError("of all things")


def silent(launch: Launch, link: Link, ready: Ready) -> None:
    pass


def dies(launch: Launch, link: Link, ready: Ready) -> None:
    log.error("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(launch: Launch, link: Link, ready: Ready) -> None:
    log.warning("pid %d", os.getpid())
    hang()


def ready_without_answers(launch: Launch, link: Link, ready: Ready) -> None:
    log.warning("pid %d", os.getpid())
    ready()
    hang()


def mounted_over(launch: Launch, link: Link, ready: Ready) -> None:
    """A second command got past the check while the first was starting."""
    subprocess.run(["mount", "-t", "tmpfs", "other", launch.mount_point], check=True)
    raise ConfigError("cache_dir: in use by another process")


def serves_once(launch: Launch, link: Link, ready: Ready) -> None:
    """The first daemon serves; those after it fail on start."""
    if link.starts:
        raise ConfigError("cache_dir: is gone")
    empty(launch, link, ready)


if __name__ == "__main__":
    serve(globals()[sys.argv[1]], sys.argv[2:])
