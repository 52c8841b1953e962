"""The daemon's end of `.ucmfs/sock`: one task per connection, one request at a time on each."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import trio

from ucmfs.block import Attributes, check_name, parent_of
from ucmfs.control import protocol
from ucmfs.errors import (
    BlockBusy,
    BlockDenied,
    BlockNotFound,
    NotABlock,
    ProtocolError,
    UcmfsError,
    Unsupported,
    from_os_error,
)
from ucmfs.pipeline.pipeline import Pipeline
from ucmfs.pipeline.writeback import Flushed
from ucmfs.stages.cache import OpenBlock, Staging

__all__ = ["Hooks", "flushed_result", "serve", "serve_listener"]

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
FILLS_OF_ONE_REQUEST = 8
MAX_STAGINGS = 4096
"""Staging files of one connection; each is a descriptor of the daemon."""
T = TypeVar("T")


async def _nothing(name: str) -> None:
    pass


class Hooks(NamedTuple):
    """What the mount wants to know or do; all of it may be absent, as in a process without a mount."""

    changed: Callable[[str], Awaitable[None]] = _nothing
    """A block was published or removed over the socket: what the kernel remembers of it is old."""
    take_back: Callable[[str], Awaitable[None]] = _nothing
    """A block is to leave the Cache: nobody outside of the daemon may begin to use it meanwhile."""
    unmount: Callable[[protocol.Unmount], Awaitable[dict[str, Any]]] | None = None
    unmount_answered: Callable[[], None] = lambda: None
    """Who asked to unmount has the answer."""
    restart: Callable[[protocol.Restart], Callable[[], None]] | None = None
    """Check the request; give what ends this daemon, to be called once the answer is sent."""
    stats: Callable[[], Awaitable[dict[str, Any]]] | None = None


class Peer(NamedTuple):
    """Who is at the other end, by SO_PEERCRED and SO_PEERGROUPS."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        so_peergroups = 59
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, so_peergroups, 4096)
        except OSError:
            raw = b""
        return cls(pid, uid, gid, frozenset({gid, *struct.unpack(f"{len(raw) // 4}i", raw)}))

    def may(self, attributes: Attributes, want: int) -> bool:
        """Whether the mode of *attributes* grants *want* (4 read, 2 write, 1 search)."""
        if self.uid in (0, os.geteuid()):
            return True
        shift = 6 if attributes.uid == self.uid else 3 if attributes.gid in self.groups else 0
        return (stat.S_IMODE(attributes.mode) >> shift) & want == want


async def serve_listener(pipeline: Pipeline, listener: socket.socket, hooks: Hooks) -> None:
    """Accept and serve connections until cancelled."""
    accepting = trio.socket.from_stdlib_socket(listener)
    places = trio.Semaphore(MAX_CONNECTIONS)

    async def one(connection: socket.socket) -> None:
        try:
            await serve(pipeline, connection, hooks)
        finally:
            places.release()

    async with trio.open_nursery() as nursery:
        while True:
            # Without a place, who connects waits in the kernel's bounded backlog.
            await places.acquire()
            connection, _ = await accepting.accept()
            nursery.start_soon(one, socket.socket(fileno=connection.detach()))


async def serve(pipeline: Pipeline, sock: socket.socket, hooks: Hooks = Hooks()) -> None:  # noqa: B008 - immutable
    """Serve the connected SEQPACKET socket *sock*, and close it, when the peer closes or breaks the protocol."""
    # A packet is sent whole or not at all: the buffer must hold the largest.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, protocol.MAX_PACKET)
    with trio.socket.from_stdlib_socket(sock) as stream:
        session = _Session(pipeline, Peer.of(sock), hooks)
        try:
            while data := await stream.recv(protocol.MAX_PACKET):
                reply, fds = await session.answer(data)
                packet = protocol.encode(reply)
                if fds:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
                    await stream.sendmsg([packet], rights)
                else:
                    await stream.send(packet)
                session.let_go()
                if session.unmounting:
                    hooks.unmount_answered()
                if session.restart is not None:
                    session.restart()
        except OSError as error:
            log.debug("connection of pid %d ended: %s", session.peer.pid, error)
        finally:
            session.end()


class _Session:
    """One connection: who asks, and the staging files that end with it."""

    def __init__(self, pipeline: Pipeline, peer: Peer, hooks: Hooks) -> None:
        self._pipeline = pipeline
        self._hooks = hooks
        self._stagings: dict[int, tuple[str, Staging, int]] = {}
        self._next = 1
        self._greeted = False
        self._closers: list[Callable[[], None]] = []
        self.peer = peer
        self.unmounting = False
        self.restart: Callable[[], None] | None = None
        """To be called once the reply is sent."""

    def end(self) -> None:
        self.let_go()
        for _, staging, _ in self._stagings.values():
            self._pipeline.abandon(staging)
        self._stagings.clear()

    def let_go(self) -> None:
        """The reply is sent: give back what was held for it."""
        for close in self._closers:
            close()
        self._closers.clear()

    async def answer(self, data: bytes) -> tuple[protocol.Reply, list[int]]:
        """The reply to one packet, and the descriptors to send with it. Never raises an Exception."""
        try:
            request = protocol.decode_request(data)
            if not self._greeted and not isinstance(request, protocol.Hello):
                raise ProtocolError("say Hello first")
            fds: list[int] = []
            return await self._dispatch(request, fds), fds
        except msgspec.MsgspecError as error:
            return protocol.Reply(fault=_fault(ProtocolError(f"not a request: {error}"))), []
        except UcmfsError as error:
            return protocol.Reply(fault=_fault(error)), []
        except Exception as error:  # the counterpart of the mount's wrapper: one bad request ends nothing
            log.exception("unexpected error in a request of pid %d", self.peer.pid)
            self._pipeline.counters.unexpected += 1
            return protocol.Reply(
                fault=_fault(UcmfsError(f"unexpected error in the daemon: {type(error).__name__}"))
            ), []

    async def _dispatch(self, request: protocol.Request, fds: list[int]) -> protocol.Reply:
        names = getattr(request, "names", ())
        if len(names) > protocol.MAX_NAMES:
            raise ProtocolError(f"over {protocol.MAX_NAMES} names in one request")
        match request:
            case protocol.Hello():
                return self._hello(request)
            case protocol.Lookup():
                return await self._lookup(request)
            case protocol.Open():
                return await self._open_all(request.names, fds)
            case protocol.Create():
                return await self._rows(names, lambda name: self._create(name, request, fds), most=protocol.MAX_FDS)
            case protocol.Publish():
                return await self._rows(request.stagings, self._publish)
            case protocol.Discard():
                return await self._rows(request.stagings, self._discard)
            case protocol.Remove():
                return await self._rows(names, self._remove)
            case protocol.Prefetch():
                return await self._prefetch(request)
            case protocol.Flush():
                return await self._flush(request)
            case protocol.Evict():
                return await self._rows(names, self._evict)
            case protocol.Pin():
                return await self._rows(names, lambda name: self._pin(name, request.on))
            case protocol.Locate():
                return await self._rows(names, self._locate)
            case protocol.Stats():
                return protocol.Reply(result=await (self._hooks.stats or self._pipeline.stats)())
            case protocol.Unmount():
                return await self._unmount(request)
            case protocol.Restart():
                return self._restart(request)
        raise ProtocolError(f"unknown request {type(request).__name__}")

    async def _rows(
        self, items: Sequence[T], act: Callable[[T], Awaitable[Any]], *, most: int = protocol.MAX_NAMES
    ) -> protocol.Reply:
        if len(items) > most:
            raise ProtocolError(f"over {most} rows in one request")
        rows: list[Any] = []
        faults: dict[int, protocol.Fault] = {}
        for row, item in enumerate(items):
            try:
                rows.append(await act(item))
            except UcmfsError as error:
                rows.append(None)
                faults[row] = _fault(error)
        return protocol.Reply(rows=rows, faults=faults)

    def _hello(self, request: protocol.Hello) -> protocol.Reply:
        if request.version != protocol.VERSION:
            raise ProtocolError(f"this daemon speaks version {protocol.VERSION}, the client {request.version}")
        self._greeted = True
        return protocol.Reply(
            result={"version": protocol.VERSION, "pid": os.getpid(), "pipeline": self._pipeline.description}
        )

    # Permission: the modes decide, as for a file call

    def _allow_path(self, name: str, want_parent: int = 0) -> None:
        """Raise BlockDenied unless the peer may search to *name* (and *want_parent* in its directory)."""
        if self.peer.uid in (0, os.geteuid()):
            return
        parent = parent_of(name)
        directory = parent
        while True:
            attributes = self._pipeline.cache.directory_attributes(directory)
            want = 1 | (want_parent if directory == parent else 0)
            if attributes is None and directory == parent:
                # It will be made in the nearest directory there is.
                parent = parent_of(directory)
            elif attributes is not None and not self.peer.may(attributes, want):
                raise BlockDenied(name)
            if not directory:
                return
            directory = parent_of(directory)

    # Requests

    async def _lookup(self, request: protocol.Lookup) -> protocol.Reply:
        faults: dict[int, protocol.Fault] = {}
        good: list[int] = []
        for row, name in enumerate(request.names):
            try:
                check_name(name)
                self._allow_path(name)
                good.append(row)
            except UcmfsError as error:
                faults[row] = _fault(error)
        found = await self._pipeline.lookup([request.names[row] for row in good])
        rows: list[int | None] = [None] * len(request.names)
        for row, attributes in zip(good, found, strict=True):
            rows[row] = None if attributes is None or attributes.is_directory else attributes.size
        return protocol.Reply(rows=rows, faults=faults)

    async def _open_all(self, names: Sequence[str], fds: list[int]) -> protocol.Reply:
        """Blocks of the Cache one after another; those that have to be filled at once, a few at a time."""
        if len(names) > protocol.MAX_FDS:
            raise ProtocolError(f"over {protocol.MAX_FDS} rows in one request")
        opened: list[OpenBlock | UcmfsError | None] = [None] * len(names)
        places = trio.CapacityLimiter(FILLS_OF_ONE_REQUEST)

        async def open_one(row: int) -> None:
            try:
                opened[row] = await self._open(names[row])
            except UcmfsError as error:
                opened[row] = error

        async def fill_and_open(row: int) -> None:
            async with places:
                await open_one(row)

        async with trio.open_nursery() as nursery:
            for row, name in enumerate(names):
                if name in self._pipeline.cache.blocks:
                    await open_one(row)
                else:
                    nursery.start_soon(fill_and_open, row)
        rows: list[int | None] = []
        faults: dict[int, protocol.Fault] = {}
        for row, block in enumerate(opened):
            if isinstance(block, OpenBlock):
                fds.append(block.fd)
                rows.append(block.attributes.size)
            else:
                assert block is not None
                rows.append(None)
                faults[row] = _fault(block)
        return protocol.Reply(rows=rows, faults=faults)

    async def _open(self, name: str) -> OpenBlock:
        self._allow_path(check_name(name))
        block = await self._pipeline.open(name, lend=True)
        # Once the packet is sent the kernel has a reference of its own; until then ours keeps it from eviction.
        self._closers.append(block.close)
        if not self.peer.may(block.attributes, 4):
            raise BlockDenied(name)
        return block

    async def _create(self, name: str, request: protocol.Create, fds: list[int]) -> int:
        if request.size < 0:
            raise ProtocolError("a negative size")
        if len(self._stagings) >= MAX_STAGINGS:
            raise from_os_error(
                OSError(errno.EMFILE, f"over {MAX_STAGINGS} staging files; publish or discard some"), name
            )
        self._allow_path(check_name(name), want_parent=2)
        mode = stat.S_IFREG | stat.S_IMODE(request.mode)
        owner = Attributes(0, 0, mode, self.peer.uid, self.peer.gid)
        # Who has room for some of its blocks never waits for more: two that did would wait for each other.
        staging = await self._pipeline.create(request.size, owner, wait=not fds)
        number = self._next
        self._next += 1
        self._stagings[number] = (name, staging, request.size)
        fds.append(staging.fd)
        return number

    async def _publish(self, number: int) -> None:
        name, staging, size = self._staging(number)
        try:
            staging.reopen(writable=False)
            if staging.is_writable():
                raise BlockBusy(name, "its staging file is still open for writing; close it, then publish")
            written = os.fstat(staging.fd).st_size
        except UcmfsError:
            raise
        except OSError as error:
            raise from_os_error(error, name) from error
        if written > size:
            await self._discard(number)
            raise from_os_error(OSError(errno.EFBIG, f"{written} bytes were written, room for {size} was asked"), name)
        self._pipeline.publish(staging, name)
        del self._stagings[number]
        os.close(staging.fd)
        await self._hooks.changed(name)

    async def _discard(self, number: int) -> None:
        _, staging, _ = self._staging(number)
        del self._stagings[number]
        self._pipeline.abandon(staging)

    def _staging(self, number: int) -> tuple[str, Staging, int]:
        try:
            return self._stagings[number]
        except KeyError:
            raise BlockNotFound(f"staging file {number}", "not made on this connection, or already done") from None

    async def _remove(self, name: str) -> bool:
        self._allow_path(check_name(name), want_parent=2)
        [found] = await self._pipeline.lookup([name])
        if found is not None and found.is_directory:
            raise NotABlock(name, "it is a directory")
        removed = await self._pipeline.remove(name)
        await self._hooks.changed(name)
        return removed

    async def _prefetch(self, request: protocol.Prefetch) -> protocol.Reply:
        names = [check_name(name) for name in request.names]
        for name in names:
            self._allow_path(name)
        if request.wait:
            return protocol.Reply(rows=await self._pipeline.prefetch(names))
        return protocol.Reply(rows=self._pipeline.prefetch_soon(names))

    async def _flush(self, request: protocol.Flush) -> protocol.Reply:
        flushed = await self._pipeline.flush(request.names or None, timeout=request.timeout)
        return protocol.Reply(result=flushed_result(flushed))

    async def _evict(self, name: str) -> bool:
        self._allow_path(check_name(name), want_parent=2)
        await self._hooks.take_back(name)
        return self._pipeline.evict(name)

    async def _pin(self, name: str, on: bool) -> bool:
        self._allow_path(check_name(name), want_parent=2)
        return await self._pipeline.pin(name, on)

    async def _locate(self, name: str) -> dict[str, Any] | None:
        self._allow_path(check_name(name))
        location = await self._pipeline.locate(name)
        return None if location is None else msgspec.to_builtins(location)

    async def _unmount(self, request: protocol.Unmount) -> protocol.Reply:
        if self._hooks.unmount is None:
            raise Unsupported(self._pipeline.description, "there is no mount to end")
        self._allow_owner("unmount it")
        result = await self._hooks.unmount(request)
        self.unmounting = True
        return protocol.Reply(result=result)

    def _restart(self, request: protocol.Restart) -> protocol.Reply:
        if self._hooks.restart is None:
            raise Unsupported(self._pipeline.description, "there is no mount, and no daemon to replace")
        self._allow_owner("restart its daemon")
        self.restart = self._hooks.restart(request)
        return protocol.Reply()

    def _allow_owner(self, what: str) -> None:
        if self.peer.uid not in (0, os.geteuid()):
            raise UcmfsError(f"only root or the mount's owner may {what}", code=errno.EPERM)


def _fault(error: UcmfsError) -> protocol.Fault:
    return protocol.Fault(error.errno or errno.EIO, str(error))


def flushed_result(flushed: Flushed, error: str | None = None) -> dict[str, Any]:
    """The result of Flush and Unmount: the names still dirty (not more than a packet holds), how many, and why."""
    if error is None and flushed.error is not None:
        error = str(flushed.error)
    return {"left": flushed.left[: protocol.MAX_NAMES], "total": len(flushed.left), "error": error}
