"""A file system in memory on pyfuse3 and nothing else: what the relay and the pipeline of ucmfs are measured against.

usage: plain_pyfuse3.py MOUNTPOINT

It does what pyfuse3 lets any file system do and no more: each handler is as short as it can be, bytes are read without
a copy in Python, names and attributes are believed for as long as pyfuse3 proposes. It answers flush, as every file
system must that has something to do when a writer closes. It runs in the foreground and ends with its mount.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from dataclasses import dataclass, field
from itertools import count

import pyfuse3
import trio
from pyfuse3 import FileHandleT, FileNameT, InodeT, ModeT

MAX_NAME = 255
BLOCK = 4096


@dataclass(eq=False, slots=True)
class Node:
    """A file or a directory; one inode of the kernel."""

    attributes: pyfuse3.EntryAttributes
    data: bytearray = field(default_factory=bytearray)
    children: dict[bytes, Node] = field(default_factory=dict)
    lookups: int = 0
    """How often the kernel was told of the inode and has not yet forgotten it."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.attributes.st_mode)

    def resize(self, size: int) -> None:
        if size < len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))
        self.attributes.st_size = size
        self.attributes.st_blocks = -(-size // 512)


class Memory(pyfuse3.Operations):
    def __init__(self) -> None:
        super().__init__()
        self._numbers = count(pyfuse3.ROOT_INODE)
        self._nodes: dict[int, Node] = {}
        self._listings: dict[int, list[tuple[bytes, Node]]] = {}
        self._listing_numbers = count(1)
        self._new(stat.S_IFDIR | 0o755, os.getuid(), os.getgid()).lookups = 1

    def _new(self, mode: int, uid: int, gid: int) -> Node:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino = InodeT(next(self._numbers))
        attributes.st_mode = ModeT(mode)
        attributes.st_nlink = 2 if stat.S_ISDIR(mode) else 1
        attributes.st_uid, attributes.st_gid = uid, gid
        attributes.st_blksize = BLOCK
        attributes.st_atime_ns = attributes.st_mtime_ns = attributes.st_ctime_ns = time.time_ns()
        node = self._nodes[attributes.st_ino] = Node(attributes)
        return node

    def _make(self, parent: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext) -> Node:
        siblings = self._nodes[parent].children
        if name in siblings:
            raise pyfuse3.FUSEError(errno.EEXIST)
        node = siblings[name] = self._new(mode, ctx.uid, ctx.gid)
        node.lookups = 1
        return node

    def _child(self, parent: int, name: bytes) -> Node:
        node = self._nodes[parent].children.get(name)
        if node is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return node

    def _drop(self, node: Node) -> None:
        """*node* lost its name; it goes when the kernel does not know it either."""
        node.attributes.st_nlink = 0
        if not node.lookups:
            del self._nodes[node.attributes.st_ino]

    # Names

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        node = self._child(parent_inode, name)
        node.lookups += 1
        return node.attributes

    async def forget(self, inode_list: list[tuple[InodeT, int]]) -> None:  # type: ignore[override]
        for inode, lookups in inode_list:
            node = self._nodes[inode]
            node.lookups -= lookups
            if not node.lookups and not node.attributes.st_nlink:
                del self._nodes[inode]

    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._make(parent_inode, name, stat.S_IFDIR | mode, ctx).attributes

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        self._drop(self._child(parent_inode, name))
        del self._nodes[parent_inode].children[name]

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        if self._child(parent_inode, name).children:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        await self.unlink(parent_inode, name, ctx)

    async def opendir(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileHandleT:
        number = next(self._listing_numbers)
        self._listings[number] = list(self._nodes[inode].children.items())
        return FileHandleT(number)

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for number, (name, node) in enumerate(self._listings[fh][start_id:], start_id + 1):
            if not pyfuse3.readdir_reply(token, FileNameT(name), node.attributes, number):
                return
            node.lookups += 1

    async def releasedir(self, fh: FileHandleT) -> None:
        del self._listings[fh]

    # Attributes

    async def getattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        return self._nodes[inode].attributes

    async def setattr(
        self,
        inode: InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        node = self._nodes[inode]
        if fields.update_size:
            node.resize(attr.st_size)
        if fields.update_mode:
            node.attributes.st_mode = attr.st_mode
        if fields.update_mtime:
            node.attributes.st_mtime_ns = attr.st_mtime_ns
        return node.attributes

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = answer.f_frsize = BLOCK
        answer.f_namemax = MAX_NAME
        return answer

    # Bytes; a handle is the number of its inode, for nothing is kept of it

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        node = self._make(parent_inode, name, stat.S_IFREG | mode, ctx)
        return pyfuse3.FileInfo(fh=FileHandleT(node.attributes.st_ino)), node.attributes

    async def open(self, inode: InodeT, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=FileHandleT(inode), keep_cache=True)

    async def read(self, fh: FileHandleT, off: int, size: int) -> memoryview:  # type: ignore[override]
        return memoryview(self._nodes[fh].data)[off : off + size]

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        node = self._nodes[fh]
        if off > len(node.data):
            node.resize(off)
        node.data[off : off + len(buf)] = buf
        node.resize(len(node.data))
        node.attributes.st_mtime_ns = time.time_ns()
        return len(buf)

    async def flush(self, fh: FileHandleT) -> None:
        pass

    async def release(self, fh: FileHandleT) -> None:
        pass


def main() -> None:
    pyfuse3.init(Memory(), sys.argv[1], {*pyfuse3.default_options, "fsname=plain-pyfuse3"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main()
