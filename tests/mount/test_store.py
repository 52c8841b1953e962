"""Tensors through a mount and back: what the whole of it is for."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from tests.mounted import Mounted
from ucm.store.pipeline.connector import UcmPipelineStore
from ucmfs.errors import MountError, TaskFailed, UcmfsError

MIB = 1 << 20


def block_ids(count: int) -> list[bytes]:
    return [hashlib.sha256(str(number).encode()).digest()[:16] for number in range(count)]


def path_of(block_id: bytes) -> str:
    return f"{block_id.hex()[:3]}/{block_id.hex()}"


def test_512_blocks_of_2_mib(make_mount: Callable[..., Mounted]) -> None:
    """Dumped over the mount, loaded back equal; the same bytes at the same path below; and again after a new mount."""
    mnt = make_mount(cache_buffer_capacity_gb=0.5)
    ids = block_ids(512)
    torch.manual_seed(1)
    source = torch.randint(-(2**15), 2**15, (512, MIB), dtype=torch.int16).view(torch.bfloat16)
    rows = [[*block.chunk(4)] for block in source]

    def load() -> torch.Tensor:
        target = torch.zeros_like(source)
        with UcmPipelineStore({"mount_point": str(mnt.point)}) as store:
            assert store.lookup_on_prefix(ids) == 511
            store.wait(store.load(ids, [0] * 512, [[*block.chunk(4)] for block in target]))
        return target

    with UcmPipelineStore({"mount_point": str(mnt.point)}) as store:
        assert store.lookup_on_prefix(ids) == -1
        task = store.dump(ids, [0] * 512, rows)
        store.wait(task)
        assert store.check(task)
        assert all(store.lookup(ids))
    assert torch.equal(load().view(torch.int16), source.view(torch.int16))
    mnt.flush()
    for block_id, block in zip(ids, source, strict=True):
        wanted = block.view(torch.uint8).numpy().tobytes()
        assert (mnt.storage / path_of(block_id)).read_bytes() == wanted
    assert (mnt / path_of(ids[7])).read_bytes() == source[7].view(torch.uint8).numpy().tobytes()
    mnt.umount()
    mnt.mount()
    assert torch.equal(load().view(torch.int16), source.view(torch.int16))
    assert mnt.stats()["stages"][0]["used"] <= 512 * MIB


def test_the_mount_shows_what_the_store_does(mnt: Mounted) -> None:
    """One name space: dumped over the socket, seen, read, replaced and removed by path, and the other way round."""
    with UcmPipelineStore({"mount_point": str(mnt.point)}) as store:
        path = mnt / path_of(b"id")
        assert not path.exists()
        store.wait(store.dump([b"id"], [0], [b"first"]))
        assert path.read_bytes() == b"first"
        with open(path, "rb") as reader:
            store.wait(store.dump([b"id"], [0], [b"the second"]))
            assert reader.read() == b"first"
        # What the kernel remembered of the name is withdrawn when a block is published over the socket.
        for _ in range(100):
            if path.stat().st_size == 10:
                break
        assert path.read_bytes() == b"the second"
        os.unlink(path)
        assert store.lookup([b"id"]) == [False]
        path.write_bytes(b"by path")
        target = bytearray(7)
        store.wait(store.load([b"id"], [0], [target]))
        assert target == b"by path"


def test_parts_are_not_seen(mnt: Mounted) -> None:
    with UcmPipelineStore({"mount_point": str(mnt.point), "block_size": 8192}) as store:
        store.wait(store.dump([b"id"], [4096], [b"b" * 4096]))
        assert store.lookup([b"id"]) == [False]
        assert not (mnt / path_of(b"id")).exists()
        with pytest.raises(TaskFailed, match=path_of(b"id")):
            store.wait(store.load([b"id"], [4096], [bytearray(4096)]))
        store.wait(store.dump([b"id"], [0], [b"a" * 4096]))
        assert store.lookup([b"id"]) == [True]
        assert (mnt / path_of(b"id")).read_bytes() == b"a" * 4096 + b"b" * 4096


def test_a_client_that_dies_leaves_nothing(mnt: Mounted) -> None:
    child = os.fork()
    if child == 0:
        try:
            store = UcmPipelineStore({"mount_point": str(mnt.point), "block_size": 8 * MIB})
            store.wait(store.dump([b"id"], [0], [bytes(MIB)]))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    while mnt.stats()["stages"][0]["used"]:
        pass
    assert os.listdir(mnt.cache / "staging") == []


AS_NOBODY = """
import os, sys
from ucm.store.pipeline.connector import UcmPipelineStore
os.setgid(65534)
os.setuid(65534)
with UcmPipelineStore({"mount_point": sys.argv[1]}) as store:
    target = bytearray(1)
    store.wait(store.load([b"open"], [0], [target]))
    assert target == b"1"
    for act in (lambda: store.load([b"secret"], [0], [target]), lambda: store.dump([b"new"], [0], [b"3"])):
        try:
            store.wait(act())
        except OSError as error:
            print(error.errno)
"""


def test_modes_decide_over_the_socket_too(mnt: Mounted) -> None:
    for parent in mnt.point.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    with UcmPipelineStore({"mount_point": str(mnt.point)}) as store:
        store.wait(store.dump([b"open", b"secret"], [0, 0], [b"1", b"2"]))
    (mnt / path_of(b"secret")).chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(mnt.point)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(errno.EACCES)] * 2, done.stderr


def test_a_daemon_that_goes_away_is_an_error_not_a_hang(mnt: Mounted) -> None:
    with UcmPipelineStore({"mount_point": str(mnt.point), "timeout_ms": 1000}) as store:
        store.wait(store.dump([b"id"], [0], [b"data"]))
        mnt.kill_all()
        with pytest.raises(UcmfsError):
            store.wait(store.load([b"id"], [0], [bytearray(4)]))
        with pytest.raises(MountError):
            store.lookup([b"id"])
        mnt.mount()
        target = bytearray(4)
        store.wait(store.load([b"id"], [0], [target]))
        assert target == b"data"


def test_the_daemon_is_killed_under_a_store(mnt: Mounted) -> None:
    """To the client it is a pause: whole blocks that were on their way are written again."""
    mnt.expect("was ended by SIGKILL; starting another")
    done = threading.Event()
    killed = 0

    def kill() -> None:
        nonlocal killed
        while not done.is_set():
            # One that dies sooner counts as one that fails on start.
            if mnt.stats()["uptime_s"] > 0.4:
                mnt.kill_daemon()
                killed += 1

    killer = threading.Thread(target=kill)
    with UcmPipelineStore({"mount_point": str(mnt.point)}) as store:
        killer.start()
        try:
            turn = 0
            while killed < 5:
                turn += 1
                blocks = [b"%d-%d" % (turn, number) for number in range(8)]
                rows = [block * 5000 for block in blocks]
                store.wait(store.dump(blocks, [0] * 8, rows))
                assert all(store.lookup(blocks))
                back = [bytearray(len(row)) for row in rows]
                store.wait(store.load(blocks, [0] * 8, back))
                assert back == rows
        finally:
            done.set()
            killer.join()
    assert turn > 5
