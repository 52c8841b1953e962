"""The messages of `.ucmfs/sock`, shared by the daemon, the command line and the Python client.

The socket is AF_UNIX, SOCK_SEQPACKET. One packet is one message, MessagePack by msgspec; a request is answered by
one reply. Descriptors travel with the packet by SCM_RIGHTS in the order of the rows that have one. A packet is at
most MAX_PACKET bytes and a request at most MAX_NAMES names; `open` and `create`, at most MAX_FDS.

The first request on a connection is Hello. A daemon that does not speak the client's version answers with an error,
and so the version is the only thing that may never change its form.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "MAX_FDS",
    "MAX_NAMES",
    "MAX_PACKET",
    "VERSION",
    "Create",
    "Discard",
    "Evict",
    "Fault",
    "Flush",
    "Hello",
    "Locate",
    "Lookup",
    "Open",
    "Pin",
    "Prefetch",
    "Publish",
    "Remove",
    "Reply",
    "Request",
    "Restart",
    "Stats",
    "Unmount",
    "decode_reply",
    "decode_request",
    "encode",
]

VERSION = 1
MAX_NAMES = 1024
MAX_FDS = 128
"""Descriptors in a packet. The kernel's bound is 253 (SCM_MAX_FD); half of it keeps packets small."""
MAX_PACKET = 1 << 20


class Request(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests."""


class Hello(Request, frozen=True, tag="hello"):
    """Must come first. Result: {"version": int, "pid": int, "pipeline": str}."""

    version: int = VERSION


class Lookup(Request, frozen=True, tag="lookup"):
    """Row: the size in bytes, or null if there is no such block. Blocks still being written are not there."""

    names: list[str]


class Open(Request, frozen=True, tag="open"):
    """Row: the size; one read-only descriptor for each row without a Fault, in order."""

    names: list[str]


class Create(Request, frozen=True, tag="create"):
    """Make a staging file of `size` bytes for each name. Row: a staging id; one read-write descriptor each.

    Room for `size` bytes is reserved until publish, discard or the end of the connection. Only the first row waits for
    room; a later one without gets ENOSPC at once, to be asked for again when the first are published.
    """

    names: list[str]
    size: int
    mode: int = 0o644


class Publish(Request, frozen=True, tag="publish"):
    """Make staging files visible, whole, under their names. Row: null.

    Every descriptor of a staging file must be closed before (EBUSY if not): a published block never changes.
    """

    stagings: list[int]


class Discard(Request, frozen=True, tag="discard"):
    """Forget staging files. Row: null."""

    stagings: list[int]


class Remove(Request, frozen=True, tag="remove"):
    """Row: whether there was such a block."""

    names: list[str]


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Fill blocks into the first stage. With `wait`, answer when done. Row: whether it is (or will be) there."""

    names: list[str]
    wait: bool = False


class Flush(Request, frozen=True, tag="flush"):
    """Write dirty blocks back, all of them for no names, and answer when done.

    Result: {"left": [names still dirty, the first MAX_NAMES], "total": how many, "error": str | null}. `timeout`
    in seconds bounds the wait.
    """

    names: list[str] = []
    timeout: float | None = None


class Evict(Request, frozen=True, tag="evict"):
    """Drop blocks from the first stage. Row: whether it was there; EBUSY if it is dirty, pinned or open."""

    names: list[str]


class Pin(Request, frozen=True, tag="pin"):
    """Keep blocks in the first stage (`on`), or let them go. Row: whether there is such a block there."""

    names: list[str]
    on: bool = True


class Locate(Request, frozen=True, tag="locate"):
    """Row, or null if no stage has it: {"stages": [labels, nearest first], "state": "dirty" | "clean",
    "size": int, "digest": str | null, "pinned": bool}.
    """

    names: list[str]


class Stats(Request, frozen=True, tag="stats"):
    """Result: the mapping that `.ucmfs/stats.json` shows."""


class Unmount(Request, frozen=True, tag="unmount"):
    """Write everything back and end the mount. Only its owner or root may ask.

    Result: as that of Flush; `error` also says why the mount stays. The daemon ends the mount only if nothing is left
    dirty and no file is open, or `force` is set.
    """

    timeout: float | None = None
    force: bool = False


class Restart(Request, frozen=True, tag="restart"):
    """End this daemon for another to take over. Only the mount's owner or root may ask. Result: null.

    The daemon ends after the reply. `relay` is the version of the relay's messages that the next daemon will speak:
    a mount whose relay is of another version refuses, and has to be unmounted and mounted.
    """

    relay: int


class Fault(msgspec.Struct, frozen=True):
    """An error, of one row or of a whole request: the errno that a file call would give, and the message."""

    errno: int
    message: str


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer: `fault` if the request failed as a whole, else `rows` in the order of the request, or `result`.

    A row that failed is null in `rows` and has its Fault in `faults`, by row number.
    """

    rows: list[Any] = []
    faults: dict[int, Fault] = {}
    result: Any = None
    fault: Fault | None = None


AnyRequest = (
    Hello
    | Lookup
    | Open
    | Create
    | Publish
    | Discard
    | Remove
    | Prefetch
    | Flush
    | Evict
    | Pin
    | Locate
    | Stats
    | Unmount
    | Restart
)

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(AnyRequest)
_replies = msgspec.msgpack.Decoder(Reply)

encode = _encoder.encode
decode_request = _requests.decode
decode_reply = _replies.decode
