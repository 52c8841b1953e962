"""The daemon fails, lies or goes away: tasks end with an error that says so, and later tasks work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.faulty_daemon import Drop, FaultyDaemon, files_of
from ucm.client.links import Links
from ucm.client.mounted import SocketBlocks, connect
from ucm.client.plain import PlainBlocks
from ucm.client.requests import BlockRows
from ucm.client.tasks import Workers
from ucm.client.tensors import row_of
from ucm.store.pipeline.connector import UcmPipelineStore
from ucmfs.control import protocol
from ucmfs.control.connection import Connection
from ucmfs.control.protocol import Fault, Reply, Request
from ucmfs.errors import (
    BlockCorrupt,
    BlockError,
    MountError,
    ProtocolError,
    StoreClosed,
    TaskFailed,
    UcmfsError,
)

BLOCKS = [bytes([n]) * 16 for n in range(6)]
ROWS = [block * 100 for block in BLOCKS]


@pytest.fixture
def store(daemon: FaultyDaemon) -> Iterator[UcmPipelineStore]:
    with UcmPipelineStore({"mount_point": str(daemon.root)}) as made:
        yield made


def once(kind: type[Request], act: Callable[[Request], Reply | None]) -> Callable[[Request], Reply | None]:
    """Answer the first request of *kind* by *act*."""
    lock, spent = threading.Lock(), False

    def fail(request: Request) -> Reply | None:
        nonlocal spent
        with lock:
            if spent or not isinstance(request, kind):
                return None
            spent = True
        return act(request)

    return fail


def drop(request: Request) -> Reply:
    raise Drop


def dump(store: UcmPipelineStore) -> None:
    store.wait(store.dump(BLOCKS, [0] * 6, ROWS))


def load(store: UcmPipelineStore) -> list[bytearray]:
    back = [bytearray(1600) for _ in BLOCKS]
    store.wait(store.load(BLOCKS, [0] * 6, back))
    return back


@pytest.mark.parametrize("kind", [protocol.Create, protocol.Publish, protocol.Open])
def test_the_connection_is_lost_in_the_middle(
    daemon: FaultyDaemon, store: UcmPipelineStore, kind: type[Request]
) -> None:
    """What was asked is asked again, and what was staged is written again."""
    dump(store)
    daemon.fail = once(kind, drop)
    dump(store)
    assert load(store) == ROWS


def test_a_daemon_that_drops_every_connection_fails_the_task(daemon: FaultyDaemon, store: UcmPipelineStore) -> None:
    dump(store)
    daemon.fail = drop
    for call in (lambda: dump(store), lambda: load(store)):
        with pytest.raises(TaskFailed, match=rf"row 0: .*{BLOCKS[0].hex()}: the ucmfs daemon closed") as failed:
            call()
        assert all(isinstance(error.__cause__, MountError) for _, error in failed.value.rows)
        assert len(failed.value.rows) == 6
    for lookup in (store.lookup, store.prefetch):
        with pytest.raises(MountError):
            lookup(BLOCKS)
    daemon.fail = lambda request: None
    assert load(store) == ROWS


def test_a_restart_between_tasks_goes_unnoticed(daemon: FaultyDaemon, store: UcmPipelineStore) -> None:
    dump(store)
    tasks = [store.load(BLOCKS, [0] * 6, [bytearray(1600) for _ in BLOCKS]) for _ in range(20)]
    for task in tasks:
        store.wait(task)
    daemon.restart()
    assert store.lookup_on_prefix(BLOCKS) == 5
    assert load(store) == ROWS
    dump(store)


def test_a_restart_loses_incomplete_blocks_and_says_so(daemon: FaultyDaemon) -> None:
    with UcmPipelineStore({"mount_point": str(daemon.root), "block_size": 1600}) as store:
        store.wait(store.dump(BLOCKS[:1], [0], [ROWS[0][:800]]))
        daemon.restart()
        with pytest.raises(TaskFailed, match=rf"{BLOCKS[0].hex()}: the ucmfs daemon (went away|closed)"):
            store.wait(store.dump(BLOCKS[:1], [800], [ROWS[0][800:]]))
        store.wait(store.dump(BLOCKS[:1], [800], [ROWS[0][800:]]))
        assert store.lookup(BLOCKS[:1]) == [False]
        store.wait(store.dump(BLOCKS[:1], [0], [ROWS[0][:800]]))
        assert store.lookup(BLOCKS[:1]) == [True]


@pytest.mark.parametrize(("kind", "call"), [(protocol.Create, dump), (protocol.Publish, dump), (protocol.Open, load)])
def test_a_fault_of_the_whole_request_fails_its_rows(
    daemon: FaultyDaemon, store: UcmPipelineStore, kind: type[Request], call: Callable[[UcmPipelineStore], object]
) -> None:
    dump(store)
    daemon.fail = once(kind, lambda request: Reply(fault=Fault(5, "the daemon is confused")))
    with pytest.raises(TaskFailed, match=rf"row 0: .*{BLOCKS[0].hex()}: the daemon is confused") as failed:
        call(store)
    assert [row for row, _ in failed.value.rows] == list(range(6))
    assert failed.value.errno == 5
    dump(store)
    assert load(store) == ROWS
    assert not daemon.stagings


def test_a_fault_of_a_row_fails_that_row(daemon: FaultyDaemon, store: UcmPipelineStore) -> None:
    dump(store)

    def corrupt(request: Request) -> Reply | None:
        assert isinstance(request, protocol.Open)
        (daemon.root / request.names[2]).unlink()
        return None

    daemon.fail = once(protocol.Open, corrupt)
    with pytest.raises(TaskFailed) as failed:
        load(store)
    assert [row for row, _ in failed.value.rows] == [2]

    refuse = Reply(rows=[None], faults={0: Fault(74, "x: the bytes do not match")})
    daemon.fail = once(protocol.Open, lambda request: refuse)
    with pytest.raises(TaskFailed, match=r"row 0: .*do not match") as failed:
        store.wait(store.load(BLOCKS[:1], [0], [bytearray(1)]))
    assert isinstance(failed.value.rows[0][1], BlockCorrupt)


@pytest.mark.parametrize(
    ("call", "kind", "reply"),
    [
        (load, protocol.Open, Reply(rows=[1600] * 6)),
        (load, protocol.Open, Reply(rows=[1600])),
        (dump, protocol.Create, Reply(rows=[1, 2])),
        (lambda store: store.lookup(BLOCKS), protocol.Lookup, Reply(rows=[])),
    ],
)
def test_a_reply_that_does_not_fit_its_request(
    daemon: FaultyDaemon,
    store: UcmPipelineStore,
    call: Callable[[UcmPipelineStore], object],
    kind: type[Request],
    reply: Reply,
) -> None:
    dump(store)
    daemon.fail = once(kind, lambda request: reply)
    with pytest.raises((TaskFailed, ProtocolError), match="instead of 6"):
        call(store)
    assert load(store) == ROWS


def test_a_daemon_that_does_not_answer(daemon: FaultyDaemon) -> None:
    """The exchange ends at the timeout; the late reply is not taken for the answer to the next request."""
    answer = threading.Event()

    def late(request: Request) -> None:
        answer.wait()

    blocks = SocketBlocks(lambda: Connection.to_mount(daemon.root, timeout=0.05))
    with blocks:
        assert blocks.lookup(["a"]) == [None]
        daemon.fail = once(protocol.Lookup, late)
        with pytest.raises(MountError, match="did not answer in time"):
            blocks.lookup(["a"] * 7)
        assert blocks.lookup(["b", "c"]) == [None, None]
        answer.set()
        assert blocks.lookup(["d"]) == [None]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_publish_waits_for_a_child_that_holds_the_descriptor(daemon: FaultyDaemon) -> None:
    """Between fork and exec a child has every descriptor of its parent."""
    [hold, release] = os.pipe()
    with SocketBlocks(lambda: Connection.to_mount(daemon.root)) as blocks:
        [staging] = blocks.create(["child"], 3)
        assert not isinstance(staging, UcmfsError)
        os.write(staging.fd, b"abc")
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        os.close(hold)
        busy = threading.Event()
        daemon.fail = lambda request: busy.set() if isinstance(request, protocol.Publish) else None
        outcome: list[UcmfsError | None] = []
        publisher = threading.Thread(target=lambda: outcome.extend(blocks.publish([staging])))
        publisher.start()
        busy.wait()
        os.close(release)
        os.waitpid(child, 0)
        publisher.join()
        assert outcome == [None]
        assert daemon.count(protocol.Publish) > 1
    assert files_of(daemon.root) == {"child": b"abc"}


def test_publish_gives_up_on_a_descriptor_that_stays_open(daemon: FaultyDaemon) -> None:
    with SocketBlocks(lambda: Connection.to_mount(daemon.root)) as blocks:
        [staging, other] = blocks.create(["held", "free"], 3)
        assert not isinstance(staging, UcmfsError)
        assert not isinstance(other, UcmfsError)
        held = os.dup(staging.fd)
        [error, none] = blocks.publish([staging, other])
        os.close(held)
        assert isinstance(error, BlockError)
        assert error.name == "held"
        assert none is None
        assert not daemon.stagings
    assert files_of(daemon.root) == {"free": b""}


def test_descriptors_of_a_batch_that_fails_are_closed(daemon: FaultyDaemon) -> None:
    """More names than a packet carries descriptors; the second packet fails."""
    names = [f"{n}" for n in range(protocol.MAX_FDS + 5)]
    for name in names:
        (daemon.root / name).write_bytes(b"x")
    with SocketBlocks(lambda: Connection.to_mount(daemon.root)) as blocks:
        blocks.lookup([])
        for kind in (protocol.Open, protocol.Create):
            before = len(os.listdir("/proc/self/fd"))

            def second(request: Request) -> Reply | None:
                return Reply(fault=Fault(5, "enough")) if len(getattr(request, "names", ())) == 5 else None

            daemon.fail = second
            with pytest.raises(UcmfsError, match="enough"):
                blocks.open(names) if kind is protocol.Open else blocks.create(names, 1)
            # One connection, and the daemon's end of it, may be new.
            assert len(os.listdir("/proc/self/fd")) <= before + 2
        assert not daemon.stagings


def test_who_waits_for_a_link_gets_it_before_those_who_take_any(daemon: FaultyDaemon) -> None:
    """Publishing needs the link that created; a thread that looks up all the time must not keep it from that."""
    links = Links(lambda: Connection.to_mount(daemon.root), limit=2)
    held, done = threading.Event(), threading.Event()
    link, _, _ = links.exchange(protocol.Lookup([]))

    def hold() -> None:
        with links.hold(link):
            held.set()
            done.wait()

    waiter = threading.Thread(target=hold)
    with links.hold(link):
        waiter.start()
        while not link.wanted:
            os.sched_yield()
    other, _, _ = links.exchange(protocol.Lookup([]))
    assert other is not link
    held.wait()
    done.set()
    waiter.join()
    links.close()


def test_a_link_that_was_interrupted_is_not_used_again(daemon: FaultyDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reply is still to come, and would be taken for the answer to the next request."""
    dialled: list[Connection] = []

    def dial() -> Connection:
        dialled.append(Connection.to_mount(daemon.root))
        return dialled[-1]

    def interrupt(request: Request) -> None:
        raise KeyboardInterrupt

    with SocketBlocks(dial) as blocks:
        blocks.lookup(["a"])
        monkeypatch.setattr(dialled[0], "exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            blocks.lookup(["a"])
        assert blocks.lookup(["a"]) == [None]
    assert len(dialled) == 2


def test_work_that_comes_after_close_fails() -> None:
    workers = Workers(1)
    workers.close()
    rows = [row_of(0, 0, b"x", writable=False)]
    with pytest.raises(TaskFailed, match="row 0: the/block: the store is closed"):
        workers.start([BlockRows("the/block", rows)], lambda blocks: {}).result()


def test_an_unexpected_error_ends_the_task(caplog: pytest.LogCaptureFixture) -> None:
    def broken(blocks: object) -> dict[int, UcmfsError]:
        raise ZeroDivisionError("oops")

    workers = Workers(1)
    rows = [row_of(0, 0, b"x", writable=False)]
    with pytest.raises(TaskFailed, match="row 0: the/block: unexpected ZeroDivisionError: oops"):
        workers.start([BlockRows("the/block", rows)], broken).result()
    assert "unexpected error" in caplog.text
    workers.close()


def test_a_closed_client_says_so(daemon: FaultyDaemon) -> None:
    blocks = SocketBlocks(lambda: Connection.to_mount(daemon.root))
    blocks.lookup([])
    blocks.close()
    blocks.close()
    with pytest.raises(StoreClosed):
        blocks.lookup(["a"])


# Which way to a mount


def test_connect_takes_the_socket_where_a_daemon_answers(daemon: FaultyDaemon) -> None:
    with connect(daemon.root) as blocks:
        assert isinstance(blocks, SocketBlocks)


def test_connect_takes_plain_files_elsewhere(tmp_path: Path, daemon: FaultyDaemon) -> None:
    with connect(tmp_path) as blocks:
        assert isinstance(blocks, PlainBlocks)
    (tmp_path / ".ucmfs").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / ".ucmfs/sock"))
    with connect(tmp_path) as blocks:
        assert isinstance(blocks, PlainBlocks)


def test_connect_does_not_take_plain_files_behind_a_hanging_daemon(tmp_path: Path) -> None:
    (tmp_path / ".ucmfs").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / ".ucmfs/sock"))
        silent.listen()
        with pytest.raises(MountError, match="in time"):
            connect(tmp_path, timeout=0.05)


# The process around it


def test_a_program_that_forgets_to_close(tmp_path: Path, cache_dir: Path) -> None:
    """It ends, with what it dumped on disk and no incomplete block left behind."""
    program = f"""
from ucm.store.pipeline.connector import UcmPipelineStore
plain = UcmPipelineStore({{"mount_point": {str(tmp_path / "plain")!r}, "block_size": 8}})
plain.dump([b"whole", b"part"], [0, 0], [b"12345678", b"1234"])
piped = UcmPipelineStore({{"storage_backends": {str(tmp_path / "posix")!r}, "cache_dir": {str(cache_dir)!r},
    "cache_buffer_capacity_gb": 0.01, "write_back_interval": 3600.0}})
piped.dump([b"id"], [0], [b"data"])
"""
    for name in ("plain", "posix"):
        (tmp_path / name).mkdir()
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert files_of(tmp_path / "plain") == {f"776/{b'whole'.hex()}": b"12345678"}
    assert (tmp_path / f"posix/696/{b'id'.hex()}").read_bytes() == b"data"
