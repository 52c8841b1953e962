"""What an engine does with a KV cache, in two processes: `dump` writes it over a mount, `load` reads it and compares.

usage: quickstart_demo.py dump|load MOUNTPOINT
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable

import torch

from ucm.store.pipeline.connector import UcmPipelineStore

LAYERS, BLOCKS, TOKENS, KV_HEADS, HEAD_DIM = 32, 64, 16, 8, 128
BLOCK_SIZE = LAYERS * 2 * TOKENS * KV_HEADS * HEAD_DIM * 2  # K and V; bf16 is two bytes


def kv_cache(values: Callable[[tuple[int, ...]], torch.Tensor]) -> list[torch.Tensor]:
    """One tensor each for K and V of every layer, as an engine allocates them."""
    return [values((BLOCKS, TOKENS, KV_HEADS, HEAD_DIM)) for _ in range(2 * LAYERS)]


def prefilled() -> list[torch.Tensor]:
    """Random numbers stand in for what a model computes; every call gives the same."""
    generator = torch.Generator().manual_seed(0)
    return kv_cache(lambda shape: torch.randn(shape, generator=generator, dtype=torch.bfloat16))


def block_ids() -> list[bytes]:
    """Each id is the hash of the block's tokens and of the id before it, so that equal prefixes share blocks."""
    ids: list[bytes] = []
    for block in range(BLOCKS):
        tokens = bytes(range(block, block + TOKENS))
        ids.append(hashlib.blake2b((ids[-1] if ids else b"") + tokens, digest_size=16).digest())
    return ids


def rows(cache: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """For each block its part of every tensor, end to end in the block's file."""
    return [[tensor[block] for tensor in cache] for block in range(BLOCKS)]


def main() -> None:
    verb, mount_point = sys.argv[1:]
    ids = block_ids()
    offsets = [0] * BLOCKS
    total = BLOCKS * BLOCK_SIZE
    with UcmPipelineStore({"mount_point": mount_point, "block_size": BLOCK_SIZE}) as store:
        if verb == "dump":
            cache = prefilled()
            start = time.perf_counter()
            store.wait(store.dump(ids, offsets, rows(cache)))
            print(f"dumped {BLOCKS} blocks of {BLOCK_SIZE >> 20} MiB, {2 * LAYERS} tensors each: {rate(total, start)}")
            print(f"lookup_on_prefix: the first {store.lookup_on_prefix(ids) + 1} blocks are there")
        elif verb == "load":
            # Ones, not empty memory: the time would be that of the first page faults.
            cache = kv_cache(lambda shape: torch.ones(shape, dtype=torch.bfloat16))
            start = time.perf_counter()
            store.wait(store.load(ids, offsets, rows(cache)))
            print(f"loaded {BLOCKS} blocks: {rate(total, start)}")
            # Compared as integers: NaN differs from itself, and its bits may not.
            if not all(
                torch.equal(found.view(torch.int16), wanted.view(torch.int16))
                for found, wanted in zip(cache, prefilled(), strict=True)
            ):
                sys.exit("the tensors DIFFER from what was dumped")
            print(f"all {2 * LAYERS} tensors are equal to what was dumped, bit for bit")
        else:
            sys.exit(__doc__)


def rate(total: int, start: float) -> str:
    seconds = time.perf_counter() - start
    return f"{total / 1e6:.0f} MB in {seconds * 1000:.0f} ms, {total / seconds / 1e9:.2f} GB/s ({os.cpu_count()} cores)"


if __name__ == "__main__":
    main()
