"""Everything dies at chosen points, the mount too; a new one finds every published block and every dirty one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from tests.mounted import Mounted

MIB = 1 << 20


def test_dirty_blocks_survive_the_daemon(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount(write_back_interval=3600, write_back_batch_size=100_000)
    blocks = {f"{number:02}/b{number}": os.urandom(MIB + number) for number in range(20)}
    for name, data in blocks.items():
        (mnt / name).parent.mkdir()
        (mnt / name).write_bytes(data)
    assert mnt.status()["stages"][0]["dirty"] == 20
    assert os.listdir(mnt.storage) == [".ucmfs"]  # the crash comes before write-back, or this proves nothing
    mnt.kill_all()
    mnt.config["write_back_interval"] = 0.1
    mnt.mount()
    assert {name: (mnt / name).read_bytes() for name in blocks} == blocks
    mnt.flush()
    assert {name: (mnt.storage / name).read_bytes() for name in blocks} == blocks
    assert mnt.status()["stages"][0]["dirty"] == 0


def test_what_was_being_written_is_gone(mnt: Mounted) -> None:
    fd = os.open(mnt / "block", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x" * MIB)
    assert len(os.listdir(mnt.cache / "staging")) == 1
    mnt.kill_all()
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)
    mnt.mount()
    assert not (mnt / "block").exists()
    assert os.listdir(mnt.cache / "staging") == []
    assert mnt.stats()["stages"][0]["used"] == 0


def test_a_half_copied_write_back_is_repeated(make_mount: Callable[..., Mounted]) -> None:
    """Killed in the middle of write-back: some blocks are below, the rest dirty, all are right in the end."""
    mnt = make_mount(write_back_batch_size=2)
    data = os.urandom(2 * MIB)
    names = [f"b{number}" for number in range(50)]
    for name in names:
        (mnt / f"{name}.tmp").write_bytes(data)
    status = mnt.status()
    # Renamed, they are written back two at a time; the first that is below is the moment.
    for name in names:
        os.rename(mnt / f"{name}.tmp", mnt / name)
        if len(os.listdir(mnt.storage)) > 1:
            break
    mnt.kill_all(status=status)
    names = names[: names.index(name) + 1]
    dirty = [name for name in names if (mnt.cache / "dirty" / name).exists()]
    below = [name for name in names if (mnt.storage / name).exists()]
    assert below, "nothing was below yet when the daemon died: the crash point was missed"
    assert dirty, "nothing was dirty when the daemon died: the crash point was missed"
    for name in below:
        assert (mnt.storage / name).read_bytes() == data
    mnt.mount()
    mnt.flush()
    for name in names:
        assert (mnt / name).read_bytes() == data
        assert (mnt.storage / name).read_bytes() == data
    staging = list((mnt.storage / ".ucmfs/staging").iterdir())
    assert len(staging) == 1  # the living daemon's own; the dead one's was removed


def test_both_trees_after_a_crash(mnt: Mounted) -> None:
    """The same name clean and dirty: the dirty one is the newer."""
    (mnt / "x").write_bytes(b"old")
    mnt.flush()
    mnt.kill_all()
    (mnt.cache / "dirty/x").write_bytes(b"newer")
    mnt.mount()
    assert (mnt / "x").read_bytes() == b"newer"
    assert mnt.stats()["stages"][0]["used"] == 4096
    mnt.flush()
    assert (mnt.storage / "x").read_bytes() == b"newer"
    assert not (mnt.cache / "dirty/x").exists()


def test_a_dead_mount_is_cleared(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    mnt.flush()
    mnt.kill_all(clear=False)
    done = mnt.ucmfs("mount", mnt.config_file, mnt.point)
    assert "dead" in done.stderr
    assert (mnt / "x").read_bytes() == b"data"


def test_unmount_and_mount_find_everything(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    (mnt / "k.tmp").write_bytes(b"temporary")
    mnt.umount()
    assert (mnt.storage / "x").read_bytes() == b"data"
    assert not (mnt.storage / "k.tmp").exists()
    mnt.mount()
    assert (mnt / "k.tmp").read_bytes() == b"temporary"
    assert mnt.stats()["stages"][0]["blocks"] == 2


def test_plain_umount_writes_back_too(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    daemon = os.pidfd_open(mnt.status()["pid"])
    subprocess.run(["umount", str(mnt.point)], check=True)
    mnt.wait_exit(daemon)
    assert (mnt.storage / "x").read_bytes() == b"data"


def test_umount_refuses_while_files_are_open(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    with open(mnt / "x", "rb") as file:
        done = mnt.ucmfs("umount", mnt.point, check=False)
        assert done.returncode == 1
        assert "close the files that are open on it" in done.stderr
        assert file.read() == b"data"
    mnt.umount()
    assert not mnt.is_mounted


def test_sigterm_writes_back_and_unmounts(mnt: Mounted) -> None:
    (mnt / "x").write_bytes(b"data")
    pid = mnt.status()["pid"]
    daemon = os.pidfd_open(pid)
    os.kill(pid, 15)
    mnt.wait_exit(daemon)
    assert not mnt.is_mounted
    assert (mnt.storage / "x").read_bytes() == b"data"


def test_umount_names_what_it_cannot_write_back(make_mount: Callable[..., Mounted]) -> None:
    mnt = make_mount()
    mnt.expect("stays dirty", "not written back")
    (mnt.storage / "d").write_bytes(b"in the way")
    (mnt / "ok").write_bytes(b"1")
    mnt.flush()
    os.unlink(mnt.storage / "d")
    (mnt / "d").mkdir()
    (mnt / "d/x").write_bytes(b"2")
    (mnt.storage / "d").write_bytes(b"in the way again")
    done = mnt.ucmfs("umount", mnt.point, check=False)
    assert done.returncode == 1
    assert "d/x" in done.stderr
    assert mnt.is_mounted
    assert (mnt / "d/x").read_bytes() == b"2"
    os.unlink(mnt.storage / "d")
    mnt.umount()
    assert (mnt.storage / "d/x").read_bytes() == b"2"
