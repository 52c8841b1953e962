"""LMCache: `fs` adapter and native `fs` client (kind A, one temporary name for all processes), local disk (kind B)."""

from __future__ import annotations

import importlib
import itertools
import os
import select
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.engines.clients import (
    MIB,
    bare_package,
    check_round_trip,
    content,
    page_aligned,
    same_on_disk,
    stand_in,
)
from tests.mounted import Mounted

CHUNKS = 4
MODEL = "meta-llama/Llama-3.1-8B"
LIMIT_S = 30


def chunk_size(number: int, direct: bool) -> int:
    """A whole number of pages, which LMCache asks for O_DIRECT, or not."""
    return MIB if direct else MIB + number


@cache
def adapter_module() -> Any:
    importlib.import_module("torch")
    # Annotations alone need these two, and they need numba, cupy and telemetry.
    stand_in("lmcache.v1.memory_management", MemoryObj=object)
    stand_in("lmcache.v1.distributed.serde", SerdeConfig=object)
    bare_package("lmcache.v1.distributed.l2_adapters")
    return importlib.import_module("lmcache.v1.distributed.l2_adapters.fs_l2_adapter")


def warm_up() -> None:
    adapter_module()


def keys() -> Sequence[Any]:
    api = importlib.import_module("lmcache.v1.distributed.api")
    return [api.ObjectKey(content(number, 16), MODEL, number) for number in range(CHUNKS)]


def file_names() -> list[str]:
    """What the adapter and the native client call the files of keys()."""
    model = MODEL.replace("/", "-SEP-")
    return [f"{model}@{number:#010x}@0@{content(number, 16).hex()}.data" for number in range(CHUNKS)]


def empty_chunks(direct: bool) -> list[memoryview]:
    return [page_aligned(chunk_size(number, direct)) for number in range(CHUNKS)]


def chunks(seed: object, direct: bool) -> list[memoryview]:
    filled = empty_chunks(direct)
    for number, chunk in enumerate(filled):
        chunk[:] = content((seed, number), len(chunk))
    return filled


def wait_readable(fd: int) -> None:
    assert select.select([fd], [], [], LIMIT_S)[0], "LMCache does not answer"


def adapter_store(root: str, direct: bool, seed: object = "kv") -> bool:
    """Whether LMCache says that all is stored."""
    module = adapter_module()
    adapter = module.FSL2Adapter(module.FSL2AdapterConfig(root, use_odirect=direct))
    objects = [SimpleNamespace(byte_array=chunk) for chunk in chunks(seed, direct)]
    task = adapter.submit_store_task(keys(), objects)
    wait_readable(adapter.get_store_event_fd())
    stored = adapter.pop_completed_store_tasks()[task]
    adapter.close()
    return bool(stored.is_successful())


def adapter_load(root: str, direct: bool) -> None:
    module = adapter_module()
    adapter = module.FSL2Adapter(module.FSL2AdapterConfig(root, use_odirect=direct))
    task = adapter.submit_lookup_and_lock_task(keys(), {})
    wait_readable(adapter.get_lookup_and_lock_event_fd())
    assert adapter.query_lookup_and_lock_result(task).get_indices_list() == list(range(CHUNKS))
    into = empty_chunks(direct)
    task = adapter.submit_load_task(keys(), [SimpleNamespace(byte_array=chunk) for chunk in into])
    wait_readable(adapter.get_load_event_fd())
    assert adapter.query_load_result(task).get_indices_list() == list(range(CHUNKS))
    adapter.close()
    assert into == chunks("kv", direct)


def native(root: str, direct: bool, act: Callable[[Any], int]) -> Any:
    importlib.import_module("torch")  # lmcache_fs is linked with it
    client = importlib.import_module("lmcache.lmcache_fs").LMCacheFSClient(root, 4, "", direct, 0)
    future = act(client)
    wait_readable(client.event_fd())
    [completion] = client.drain_completions()
    client.close()
    assert completion[:2] == (future, True), completion
    return completion


def native_keys() -> list[str]:
    return [f"{MODEL}@{number:08x}@0@{content(number, 16).hex()}" for number in range(CHUNKS)]


def native_store(root: str, direct: bool) -> bool:
    stored = chunks("kv", direct)
    native(root, direct, lambda client: int(client.submit_batch_set(native_keys(), stored)))
    return True


def native_load(root: str, direct: bool) -> None:
    into = empty_chunks(direct)
    native(root, direct, lambda client: int(client.submit_batch_get(native_keys(), into)))
    assert into == chunks("kv", direct)


# The calls of LocalDiskBackend.write_file and read_file, lmcache 0.5.6, v1/storage_backend/local_disk_backend.py:
# the class itself wants an allocator, a configuration and a controller.


def local_disk_store(root: str, direct: bool) -> bool:
    for name, chunk in zip(file_names(), chunks("kv", direct), strict=True):
        path = f"{root}/{name}"
        if direct:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
            os.write(fd, chunk)
            os.close(fd)
        else:
            with open(path, "wb") as file:
                file.write(chunk)
    return True


def local_disk_load(root: str, direct: bool) -> None:
    into = empty_chunks(direct)
    for name, chunk in zip(file_names(), into, strict=True):
        path = f"{root}/{name}"
        if direct:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            with os.fdopen(fd, "rb", buffering=0) as unbuffered:
                unbuffered.readinto(chunk)
        else:
            with open(path, "rb") as file:
                file.readinto(chunk)
    assert into == chunks("kv", direct)


CLIENTS = {
    "adapter": (adapter_store, adapter_load),
    "native": (native_store, native_load),
    "local_disk": (local_disk_store, local_disk_load),
}


def test_chunks_are_stored_and_loaded(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    writer, reader = engine(), engine()
    files: dict[str, bytes] = {}
    for client, direct in itertools.product(CLIENTS, (False, True)):
        place = mnt / f"{client}_{direct}"
        place.mkdir()
        store, _ = CLIENTS[client]
        assert writer.submit(store, str(place), direct).result()
        for name, chunk in zip(file_names(), chunks("kv", direct), strict=True):
            files[f"{place.name}/{name}"] = bytes(chunk)

    def load_all() -> None:
        for client, direct in itertools.product(CLIENTS, (False, True)):
            _, load = CLIENTS[client]
            reader.submit(load, str(mnt / f"{client}_{direct}"), direct).result()

    check_round_trip(mnt, files, load_all)


def test_two_processes_store_the_same_keys(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    root = str(mnt.point)
    writers = [engine(), engine()]
    for ready in [writer.submit(warm_up) for writer in writers]:
        ready.result()
    stored = [writer.submit(adapter_store, root, False, seed) for seed, writer in enumerate(writers)]
    for future in stored:
        # A rename may find that the other process took the temporary name along; that is for LMCache to bear.
        future.result()
    versions = [chunks(seed, False) for seed in range(2)]
    files = {name: (mnt / name).read_bytes() for name in file_names()}
    for number, found in enumerate(files.values()):
        assert found in [version[number] for version in versions]
    same_on_disk(mnt, files)
