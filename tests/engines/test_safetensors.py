"""safetensors (kind A): writes to `.tmpXXXXXX`, renames, and only then closes; reads by MAP_PRIVATE."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from tests.engines.clients import MIB, check_round_trip, content
from tests.mounted import Mounted

FILES = 6


def tensors(seed: object, nbytes: int = MIB + 6) -> dict[str, np.ndarray[Any, Any]]:
    """One layer's K and V; of a size that is no multiple of a page."""
    return {name: np.frombuffer(content((seed, name), nbytes), np.float16) for name in ("k", "v")}


def store(root: str, first: int = 0) -> None:
    for number in range(FILES):
        save_file(tensors(first + number), f"{root}/layer_{number}.safetensors", metadata={"format": "np"})


def load(root: str) -> None:
    for number in range(FILES):
        found = load_file(f"{root}/layer_{number}.safetensors")
        assert {name: tensor.tobytes() for name, tensor in found.items()} == {
            name: tensor.tobytes() for name, tensor in tensors(number).items()
        }


def test_files_are_saved_and_loaded(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    writer, reader = engine(), engine()
    writer.submit(store, str(mnt.point)).result()
    files = {f"layer_{number}.safetensors": save(tensors(number), {"format": "np"}) for number in range(FILES)}
    check_round_trip(mnt, files, lambda: reader.submit(load, str(mnt.point)).result())
    assert (mnt / "layer_0.safetensors").stat().st_mode & 0o777 == 0o600


def test_a_mapped_file_stays_as_it_was_when_it_is_saved_anew(mnt: Mounted, engine: Callable[[], Executor]) -> None:
    writer = engine()
    writer.submit(store, str(mnt.point)).result()
    with safe_open(mnt / "layer_0.safetensors", "np") as mapped:
        writer.submit(store, str(mnt.point), 100).result()
        with safe_open(mnt / "layer_0.safetensors", "np") as anew:
            for name in ("k", "v"):
                assert mapped.get_tensor(name).tobytes() == tensors(0)[name].tobytes()
                assert anew.get_tensor(name).tobytes() == tensors(100)[name].tobytes()
