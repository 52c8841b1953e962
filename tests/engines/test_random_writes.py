"""Kind C: one large file, random reads and writes by page and by byte, mappings; in processes of their own."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
from collections.abc import Callable
from concurrent.futures import Executor

from tests.engines.clients import KIB, MIB, content, page_aligned, same_on_disk
from tests.mounted import Mounted

SIZE = 12 * MIB
PAGE = 4 * KIB
ROUNDS = 120
FALLOC_FL_KEEP_SIZE = 1


def random_access(fd: int, model: bytearray, seed: int, *, aligned: bool) -> None:
    """Write and read back at random, *model* along with *fd*; O_DIRECT on the descriptor asks for *aligned* on disks."""
    chance = random.Random(seed)
    unit = PAGE if aligned else 1
    for number in range(ROUNDS):
        offset = chance.randrange(len(model) // unit) * unit
        length = min(chance.randrange(1, 256 * KIB // unit) * unit, len(model) - offset)
        buffer = page_aligned(length)
        if number % 2:
            buffer[:] = content((seed, number), length)
            assert os.pwritev(fd, [buffer], offset) == length
            model[offset : offset + length] = buffer
        else:
            assert os.preadv(fd, [buffer], offset) == length
            assert buffer == model[offset : offset + length]


def read_whole(fd: int) -> bytes:
    return b"".join(os.pread(fd, MIB, offset) for offset in range(0, os.fstat(fd).st_size, MIB))


def kvbm_pool(root: str) -> None:
    """NVIDIA Dynamo KVBM, lib/llm/src/block_manager/storage/disk.rs: DiskStorage::new, allocate_file, Drop."""
    libc = ctypes.CDLL(None, use_errno=True)
    template = ctypes.create_string_buffer(os.fsencode(f"{root}/dynamo-kvbm-disk-cache-XXXXXX"))
    fd = libc.mkostemp(template, os.O_CLOEXEC)
    assert fd >= 0
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    if libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(SIZE)) != 0:
        assert ctypes.get_errno() == errno.EOPNOTSUPP
    os.ftruncate(fd, SIZE)
    os.unlink(os.fsdecode(template.value))
    model = bytearray(SIZE)
    random_access(fd, model, 1, aligned=True)
    random_access(fd, model, 2, aligned=False)
    assert read_whole(fd) == model
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_kvbm_pool_that_has_no_name(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    engine().submit(kvbm_pool, str(mnt.point)).result()
    assert os.listdir(mnt.point) == []
    assert mnt.stats()["stages"][0]["used"] == 0
    same_on_disk(mnt, {})


def kvbm_named_pool(path: str) -> bytes:
    """The same with DYN_KVBM_DISK_..., which keeps the name: what it left in the file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, SIZE)
    model = bytearray(SIZE)
    random_access(fd, model, 3, aligned=False)
    os.close(fd)
    return bytes(model)


def hf3fs_write(path: str, model: bytes, seed: int) -> bytes:
    """SGLang's mock client of 3FS, mem_cache/storage/hf3fs/hf3fs_client.py, Hf3fsMockClient: O_RDWR|O_CREAT, ftruncate, pwrite."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SIZE)
    changed = bytearray(model)
    random_access(fd, changed, seed, aligned=False)
    os.close(fd)
    return bytes(changed)


def hf3fs_read(path: str, model: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SIZE)
    assert read_whole(fd) == model
    os.close(fd)


def test_hf3fs_file(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    path = str(mnt / "hicache.data")
    writer, reader = engine(), engine()
    model = writer.submit(hf3fs_write, path, bytes(SIZE), 4).result()
    reader.submit(hf3fs_read, path, model).result()
    same_on_disk(mnt, {"hicache.data": model})
    mnt.umount()
    mnt.mount()
    reader.submit(hf3fs_read, path, model).result()
    # Another process goes on with the file, as after a restart of the engine.
    model = reader.submit(hf3fs_write, path, model, 5).result()
    writer.submit(hf3fs_read, path, model).result()
    same_on_disk(mnt, {"hicache.data": model})


def map_and_write(path: str, seed: int) -> None:
    """LMCache's fallback of GDS, storage_backend/gds_backend.py: ftruncate and a shared mapping."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE, mmap.MAP_SHARED) as shared:
        for offset in range(0, SIZE, MIB):
            shared[offset : offset + MIB - 3] = content((seed, offset), MIB - 3)
    os.close(fd)


def mapped(seed: int) -> bytes:
    return b"".join(content((seed, offset), MIB - 3) + bytes(3) for offset in range(0, SIZE, MIB))


def map_and_read(path: str, seed: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    with mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
        assert private[:] == mapped(seed)
        private[:PAGE] = bytes(PAGE)
    assert os.pread(fd, PAGE, 0) == mapped(seed)[:PAGE]
    os.close(fd)


def test_mappings(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    path = str(mnt / "gds.pt")
    writer, reader = engine(), engine()
    writer.submit(map_and_write, path, 1).result()
    reader.submit(map_and_read, path, 1).result()
    same_on_disk(mnt, {"gds.pt": mapped(1)})
    mnt.umount()
    mnt.mount()
    reader.submit(map_and_read, path, 1).result()
    writer.submit(map_and_write, path, 2).result()
    reader.submit(map_and_read, path, 2).result()
    same_on_disk(mnt, {"gds.pt": mapped(2)})
