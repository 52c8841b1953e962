"""SGLang: HiCacheFile (kind A: `.<uuid>.tmp`, tofile, rename; evicts by unlink) and its mock of 3FS (kind C)."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import cache
from pathlib import Path
from typing import Any

from tests.engines.clients import KIB, MIB, bare_package, check_round_trip, content, same_on_disk, stand_in
from tests.mounted import Mounted

SIZES = {
    **{f"page1_{number:02}": 128 * KIB for number in range(24)},
    **{f"page64_{number}": 8 * MIB for number in range(1)},
    # From 16 MiB numpy asks for the room with fallocate first.
    "long": 17 * MIB + 4,
}
SUFFIX = "_llama_0_1.bin"


@cache
def storage_module() -> Any:
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage", "sglang.srt.utils"):
        bare_package(name)
    # The one function of it that HiCacheFile's evictor calls; the module wants orjson, zmq, triton and more.
    stand_in("sglang.srt.utils.common", human_readable_int=int)
    return importlib.import_module("sglang.srt.mem_cache.hicache_storage")


def open_storage(root: str, **extra_config: Any) -> Any:
    module = storage_module()
    config = module.HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="llama",
        extra_config=extra_config,
    )
    return module.HiCacheFile(config, root)


def tensor(data: bytes) -> Any:
    torch = importlib.import_module("torch")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def store(root: str, sizes: Mapping[str, int]) -> None:
    storage = open_storage(root)
    assert storage.batch_set(list(sizes), [tensor(content(key, size)) for key, size in sizes.items()])


def load(root: str) -> None:
    storage = open_storage(root)
    assert storage.batch_exists_v2([*SIZES, "missing"]).kv_hit_pages == len(SIZES)
    assert not storage.exists("missing")
    for key, size in SIZES.items():
        found = storage.get(key, tensor(bytes(size)))
        assert found.numpy().tobytes() == content(key, size)


def test_pages_are_stored_and_loaded(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    root = str(mnt.point)
    writer, reader = engine(), engine()
    writer.submit(store, root, SIZES).result()
    files = {key + SUFFIX: content(key, size) for key, size in SIZES.items()}
    check_round_trip(mnt, files, lambda: reader.submit(load, root).result())


PAGE = 256 * KIB
PAGES = 24
ROOM = 8
"""Pages that SGLang lets its directory have."""


def store_more_than_fits(root: str) -> None:
    # It fills up to 0.9 of max_size.
    storage = open_storage(root, max_size=str(ROOM * PAGE * 10 // 9 + 9), min_free_space=str(MIB))
    for number in range(PAGES):
        assert storage.set(f"new_{number:02}", tensor(content(number, PAGE)))


def test_its_own_eviction(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    root = str(mnt.point)
    engine().submit(store, root, {f"old_{number}": PAGE for number in range(4)}).result()
    mnt.flush()
    engine().submit(store_more_than_fits, root).result()
    kept = range(PAGES - ROOM, PAGES)
    same_on_disk(mnt, {f"new_{number:02}{SUFFIX}": content(number, PAGE) for number in kept})


FILE = 3 * MIB
PAGES_OF_FILE = FILE // (64 * KIB)


def open_file(path: str) -> Any:
    storage_module()
    module = importlib.import_module("sglang.srt.mem_cache.storage.hf3fs.hf3fs_client")
    return module.Hf3fsMockClient(path, FILE, 64 * KIB, 8)


def page_content(seed: int, page: int) -> bytes:
    return content((seed, page), 64 * KIB)


def batches(seed: int) -> Iterator[list[int]]:
    """All pages in an order of *seed*'s, eight at a time."""
    pages = random.Random(seed).sample(range(PAGES_OF_FILE), PAGES_OF_FILE)
    return (pages[first : first + 8] for first in range(0, PAGES_OF_FILE, 8))


def write_pages(path: str, seed: int, storage: str) -> None:
    client = open_file(path)
    for pages in batches(seed):
        tensors = [tensor(page_content(seed, page)) for page in pages]
        assert client.batch_write([page * 64 * KIB for page in pages], tensors) == [64 * KIB] * len(pages)
    client.flush()
    # It syncs, and so has the file below while it is still open.
    assert Path(storage).read_bytes() == file_content(seed)
    client.close()


def read_pages(path: str, seed: int) -> None:
    client = open_file(path)
    for pages in batches(seed + 1):
        tensors = [tensor(bytes(64 * KIB)) for _ in pages]
        assert client.batch_read([page * 64 * KIB for page in pages], tensors) == [64 * KIB] * len(pages)
        assert [found.numpy().tobytes() for found in tensors] == [page_content(seed, page) for page in pages]
    client.close()


def file_content(seed: int) -> bytes:
    return b"".join(page_content(seed, page) for page in range(PAGES_OF_FILE))


def test_3fs_file(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    path, below = str(mnt / "3fs/hicache.data"), str(mnt.storage / "3fs/hicache.data")
    writer, reader = engine(), engine()
    for seed in (1, 2):
        writer.submit(write_pages, path, seed, below).result()
        reader.submit(read_pages, path, seed).result()
    check_round_trip(mnt, {"3fs/hicache.data": file_content(2)}, lambda: reader.submit(read_pages, path, 2).result())
