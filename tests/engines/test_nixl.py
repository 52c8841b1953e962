"""NIXL's POSIX backend (kinds B and C): O_DIRECT files and pools, by each of the kernel's asynchronous interfaces."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from tests.engines.clients import MIB, check_round_trip, content, page_aligned
from tests.mounted import Mounted

BLOCK = MIB // 2
BLOCKS = 8
SLOTS = 4
"""Blocks in one file of a static pool."""


def interfaces() -> Sequence[str]:
    """NIXL's names of the interfaces that this kernel lets a process use; a container's filter may forbid io_uring."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = ["use_posix_aio", "use_aio"]
    io_uring_setup, parameters = 425, ctypes.create_string_buffer(120)
    ring = libc.syscall(io_uring_setup, 1, parameters)
    if ring >= 0:
        os.close(ring)
        found.append("use_uring")
    else:
        assert ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES)
    return found


class Agent:
    """A NIXL agent with one block of memory for each of *count* blocks."""

    def __init__(self, interface: str, count: int) -> None:
        nixl = importlib.import_module("nixl")
        torch = importlib.import_module("torch")
        self._agent: Any = nixl.nixl_agent("engine", nixl.nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {interface: "true"})
        self.memory = page_aligned(count * BLOCK)
        self._blocks = torch.frombuffer(self.memory, dtype=torch.uint8).view(count, BLOCK)

    def transfer(self, direction: str, places: Sequence[tuple[int, int]]) -> None:
        """Move every block of memory to or from its place, a descriptor and an offset: "WRITE" or "READ"."""
        memory = self._agent.register_memory(list(self._blocks))
        files = self._agent.register_memory([(offset, BLOCK, fd, "") for fd, offset in places], "FILE")
        handle = self._agent.initialize_xfer(direction, memory.trim(), files.trim(), "engine")
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE"
        self._agent.release_xfer_handle(handle)
        self._agent.deregister_memory(files)
        self._agent.deregister_memory(memory)


def dynamic_files(root: str, interface: str, direction: str) -> None:
    """A file a block, at its final name; opened for reading and writing even to be read."""
    agent = Agent(interface, BLOCKS)
    if direction == "WRITE":
        agent.memory[:] = content("kv", BLOCKS * BLOCK)
    fds = [os.open(f"{root}/{n:04x}.bin", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644) for n in range(BLOCKS)]
    agent.transfer(direction, [(fd, 0) for fd in fds])
    for fd in fds:
        os.close(fd)
    assert agent.memory == content("kv", BLOCKS * BLOCK)


def test_dynamic_files(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    data = content("kv", BLOCKS * BLOCK)
    writer, reader = engine(), engine()
    files: dict[str, bytes] = {}
    for interface in interfaces():
        (mnt / interface).mkdir()
        writer.submit(dynamic_files, str(mnt / interface), interface, "WRITE").result()
        for number in range(BLOCKS):
            files[f"{interface}/{number:04x}.bin"] = data[number * BLOCK : (number + 1) * BLOCK]

    def load_all() -> None:
        for interface in interfaces():
            reader.submit(dynamic_files, str(mnt / interface), interface, "READ").result()

    check_round_trip(mnt, files, load_all)
    # To be opened for writing and read is not to be changed.
    assert mnt.stats()["stages"][0]["dirty"] == 0


def static_pool(root: str, interface: str) -> None:
    """Files of several slots, whose descriptors stay open; slots are overwritten and read in an order of their own."""
    agent = Agent(interface, BLOCKS)
    fds = [os.open(f"{root}/pool_{n}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644) for n in range(BLOCKS // SLOTS)]
    for fd in fds:
        os.ftruncate(fd, SLOTS * BLOCK)
    slots = [(fd, offset * BLOCK) for offset in reversed(range(SLOTS)) for fd in fds]
    for generation in range(3):
        agent.memory[:] = content(generation, BLOCKS * BLOCK)
        agent.transfer("WRITE", slots)
        agent.memory[:] = bytes(BLOCKS * BLOCK)
        agent.transfer("READ", slots)
        assert agent.memory == content(generation, BLOCKS * BLOCK)
        slots = slots[1:] + slots[:1]
    for fd in fds:
        os.close(fd)


def static_pool_content() -> list[bytearray]:
    """What the last generation left, whose slots were turned by two."""
    places = [(file, offset) for offset in reversed(range(SLOTS)) for file in range(BLOCKS // SLOTS)]
    places = places[2:] + places[:2]
    pool = [bytearray(SLOTS * BLOCK) for _ in range(BLOCKS // SLOTS)]
    data = content(2, BLOCKS * BLOCK)
    for number, (file, offset) in enumerate(places):
        pool[file][offset * BLOCK : (offset + 1) * BLOCK] = data[number * BLOCK : (number + 1) * BLOCK]
    return pool


def test_static_pool(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    writer = engine()
    files: dict[str, bytes] = {}
    for interface in interfaces():
        (mnt / interface).mkdir()
        writer.submit(static_pool, str(mnt / interface), interface).result()
        files |= {f"{interface}/pool_{number}": bytes(pool) for number, pool in enumerate(static_pool_content())}

    def load_all() -> None:
        assert {name: (mnt / name).read_bytes() for name in files} == files

    check_round_trip(mnt, files, load_all)
