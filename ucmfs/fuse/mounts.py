"""Mounting and unmounting: by system calls, or with fusermount3 for who may not make them."""

from __future__ import annotations

import array
import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from ucmfs import system
from ucmfs.errors import MountError
from ucmfs.fuse import relay

__all__ = ["FLAGS", "device_at", "make_read_only", "mount_fuse", "take_away"]

FLAGS = {
    "rw": 0,
    "ro": 1,
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "sync": 16,
    "async": 0,
    "dirsync": 128,
    "atime": 0,
    "noatime": 1024,
    "nodiratime": 2048,
}
"""Mount options that are flags of mount(2), with their values."""

_NOSUID_NODEV = 2 | 4
_REMOUNT_BIND = 32 | 4096


def _mount(source: str | None, target: Path, kind: str | None, options: frozenset[str], more: int, data: str) -> None:
    flags = _NOSUID_NODEV | more
    for option in options:
        flags |= FLAGS.get(option, 0)
    try:
        system.mount(source, str(target), kind, flags, data)
    except OSError as error:
        raise MountError(
            f"{target}: the kernel refuses the mount: {error.strerror}; options {','.join(sorted(options))}",
            code=error.errno,
        ) from error


def mount_fuse(target: Path, options: frozenset[str]) -> int:
    """Mount a new FUSE connection at *target*; give its descriptor. Raises MountError.

    As root for all users, else with fusermount3 and for this user. *options* are those of FLAGS, `fsname=NAME` and
    `subtype=NAME`, and what goes without saying.
    """
    named = dict(option.split("=", 1) for option in options if "=" in option)
    name, kind = named.get("fsname", "ucmfs"), named.get("subtype", "ucmfs")
    flags = frozenset(option for option in options if option in FLAGS)
    if os.geteuid() != 0:
        others = {"allow_other"} & options
        return _fusermount(target, {"default_permissions", f"fsname={name}", f"subtype={kind}", *flags, *others})
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={fuse},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()},default_permissions,allow_other"
    try:
        _mount(name, target, f"fuse.{kind}", flags, 0, data)
    except BaseException:
        os.close(fuse)
        raise
    return fuse


def _fusermount(target: Path, options: set[str]) -> int:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        done = subprocess.run(
            ["fusermount3", "-o", ",".join(sorted(options)), "--", target],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise MountError(f"{target}: {done.stderr.strip() or 'fusermount3 failed'}")
        _, rights, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i", rights[0][2])
    return fds[0]


def device_at(target: Path) -> str:
    """The device number of what is mounted uppermost at *target*, as mountinfo writes it; '' for nothing."""
    return relay.device_at(os.fspath(target))


def take_away(target: Path, device: str) -> None:
    """Unmount *target* lazily, by whatever means there are, if it is still the mount of *device*."""
    if device_at(target) != device:
        return
    if os.geteuid() == 0:
        with suppress(OSError):  # it is gone already, or never came
            system.umount(str(target), lazy=True)
    else:
        with suppress(OSError):
            subprocess.run(["fusermount3", "-u", "-z", "-q", "--", target], stderr=subprocess.DEVNULL, check=False)


def make_read_only(target: Path, options: frozenset[str]) -> None:
    """Make the mount at *target*, which has *options*, read-only; copies of it stay as they are. Raises MountError."""
    _mount(None, target, None, options | {"ro"}, _REMOUNT_BIND, "")
