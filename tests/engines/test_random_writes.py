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

from tests.engines.clients import KIB, MIB, check_round_trip, content, page_aligned, same_on_disk
from tests.mounted import Mounted

SIZE = 6 * MIB
PAGE = 4 * KIB
ROUNDS = 60
METADATA = 4 * KIB


def random_access(fd: int, model: bytearray, seed: int, *, aligned: bool) -> None:
    """Write and read *fd* at random, and *model* along with it; *aligned* is what disks ask for with O_DIRECT."""
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


# KVBM is a part of a server in Rust; these are the calls of Dynamo 1.x, lib/llm/src/block_manager/storage/disk.rs.


def kvbm_pool(root: str) -> None:
    """DiskStorage::new, and unlink once it is registered: what DiskStorage does for the life of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    template = ctypes.create_string_buffer(os.fsencode(f"{root}/dynamo-kvbm-disk-cache-XXXXXX"))
    fd = libc.mkostemp(template, os.O_CLOEXEC)
    assert fd >= 0
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    if libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(SIZE)) != 0:
        assert ctypes.get_errno() == errno.EOPNOTSUPP
        os.ftruncate(fd, SIZE)
    assert os.fstat(fd).st_size == SIZE
    os.unlink(os.fsdecode(template.value))
    assert os.listdir(root) == []
    model = bytearray(SIZE)
    random_access(fd, model, 1, aligned=True)
    random_access(fd, model, 2, aligned=False)
    assert read_whole(fd) == model
    os.close(fd)


def test_kvbm_pool_without_a_name(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    engine().submit(kvbm_pool, str(mnt.point)).result()
    assert mnt.stats()["stages"][0]["used"] == 0
    same_on_disk(mnt, {})


def kvbm_file(path: str, model: bytes | None, seed: int) -> bytes:
    """DiskStorage::new_at_path, persistent: made and filled with zeros through a duplicate, or opened as *model*."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
    if model is None:
        fd = os.open(path, flags | os.O_CREAT, 0o644)
        model = bytes(SIZE)
        with os.fdopen(os.dup(fd), "r+b", buffering=0) as duplicate:
            duplicate.write(page_aligned(SIZE))
    else:
        fd = os.open(path, flags)
    assert read_whole(fd) == model
    changed = bytearray(model)
    random_access(fd, changed, seed, aligned=True)
    os.close(fd)
    return bytes(changed)


def test_kvbm_file_that_outlives_its_process(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    path = str(mnt / "remote/block")
    (mnt / "remote").mkdir()
    model = engine().submit(kvbm_file, path, None, 3).result()
    same_on_disk(mnt, {"remote/block": model})
    mnt.umount()
    mnt.mount()
    other = engine()
    model = other.submit(kvbm_file, path, model, 4).result()
    model = other.submit(kvbm_file, path, model, 5).result()
    same_on_disk(mnt, {"remote/block": model})


# The calls of _save_gds and _load_gds, lmcache 0.5.6, v1/storage_backend/gds_backend.py, where there is no GDS. The
# copy in between is the GPU's.


def gds_save(path: str, seed: int) -> None:
    with open(f"{path}.tmp", "wb") as file:
        file.write(content((seed, "metadata"), METADATA))
    fd = os.open(f"{path}.tmp", os.O_RDWR)
    os.ftruncate(fd, METADATA + SIZE)
    mapping = mmap.mmap(fd, METADATA + SIZE, mmap.MAP_SHARED, mmap.PROT_WRITE)
    # Only the mapping holds the file from here on.
    os.close(fd)
    memoryview(mapping)[METADATA:] = content(seed, SIZE)
    mapping.close()
    os.rename(f"{path}.tmp", path)


def gds_load(path: str, seed: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOATIME)
    assert os.read(fd, METADATA) == content((seed, "metadata"), METADATA)
    os.close(fd)
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    mapping = mmap.mmap(fd, size, mmap.MAP_PRIVATE | mmap.MAP_POPULATE, mmap.PROT_READ)
    os.close(fd)
    assert mapping[METADATA:] == content(seed, SIZE)
    mapping.close()


def test_lmcache_mappings(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    path = str(mnt / "chunk.kvcache.safetensors")
    writer, reader = engine(), engine()
    for seed in (1, 2):
        writer.submit(gds_save, path, seed).result()
        reader.submit(gds_load, path, seed).result()
    files = {"chunk.kvcache.safetensors": content((2, "metadata"), METADATA) + content(2, SIZE)}
    check_round_trip(mnt, files, lambda: reader.submit(gds_load, path, 2).result())


def write_through_a_mapping(path: str, seed: int) -> None:
    """A mapping of the whole file that is written here and there, with write() between."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE, mmap.MAP_SHARED) as shared:
        for offset in range(0, SIZE, MIB):
            shared[offset : offset + PAGE + 1] = content((seed, offset), PAGE + 1)
            os.pwrite(fd, content((seed, offset, "write"), 99), offset + 2 * PAGE)
            assert shared[offset + 2 * PAGE : offset + 2 * PAGE + 99] == content((seed, offset, "write"), 99)
    os.close(fd)


def read_through_a_mapping(path: str, seed: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    with mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as private:
        assert private[:] == written_through_a_mapping(seed)
        private[:PAGE] = bytes(PAGE)
    assert os.pread(fd, PAGE, 0) == written_through_a_mapping(seed)[:PAGE]
    os.close(fd)


def written_through_a_mapping(seed: int) -> bytes:
    data = bytearray(SIZE)
    for offset in range(0, SIZE, MIB):
        data[offset : offset + PAGE + 1] = content((seed, offset), PAGE + 1)
        data[offset + 2 * PAGE : offset + 2 * PAGE + 99] = content((seed, offset, "write"), 99)
    return bytes(data)


def test_mappings_and_writes_of_one_file(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    path = str(mnt / "pool")
    writer, reader = engine(), engine()
    for seed in (1, 2):
        writer.submit(write_through_a_mapping, path, seed).result()
        reader.submit(read_through_a_mapping, path, seed).result()
    files = {"pool": written_through_a_mapping(2)}
    check_round_trip(mnt, files, lambda: reader.submit(read_through_a_mapping, path, 2).result())
