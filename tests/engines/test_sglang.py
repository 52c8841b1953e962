"""SGLang's HiCacheFile (kind A): `.<uuid>.tmp`, numpy's tofile, rename; its own eviction by unlink."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import cache
from typing import Any

from tests.engines.clients import KIB, MIB, bare_package, check_round_trip, content, same_on_disk, stand_in
from tests.mounted import Mounted

SIZES = {
    **{f"page1_{number:02}": 128 * KIB for number in range(24)},
    **{f"page64_{number}": 8 * MIB for number in range(2)},
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
