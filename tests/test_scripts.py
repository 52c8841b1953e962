"""The scripts: the quickstart as it is; setup and test with stand-ins for .venv's programs that tell what is asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(command: str | Path, *arguments: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [command, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done


# quickstart, which finds that setup has been run


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short path, as people have it: the quickstart's lines have it in them."""
    with tempfile.TemporaryDirectory(prefix="qs", dir="/tmp") as directory:
        yield Path(directory)


def check_nothing_is_left(output: str, temporary: Path) -> None:
    assert not list(temporary.iterdir())
    assert str(temporary) not in Path("/proc/self/mountinfo").read_text()
    [memory] = re.findall(r'cache_dir: "(.+)"', output)
    assert not Path(memory).exists()


def test_quickstart_shows_a_cache_going_through_a_mount(temporary: Path) -> None:
    done = run(ROOT / "scripts/quickstart", TMPDIR=str(temporary))
    assert not done.stderr
    out = done.stdout
    assert out.count("all 64 tensors are equal to what was dumped, bit for bit") == 2
    assert "lookup_on_prefix: the first 64 blocks are there" in out
    digests = re.findall(r"\b([0-9a-f]{32})(?:  mnt/|  disk/|\"$)", out, re.MULTILINE)
    assert len(digests) == 3, "on the mount, on disk, and as the xattr"
    assert len(set(digests)) == 1
    assert "evicted 64 of 64 blocks" in out
    assert [line for line in out.splitlines() if len(line) > 100] == []
    check_nothing_is_left(out, temporary)


def test_quickstart_cleans_up_when_a_step_fails(temporary: Path, tmp_path: Path) -> None:
    broken = tmp_path / "getfattr"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run(ROOT / "scripts/quickstart", status=3, TMPDIR=str(temporary), PATH=path)
    assert "quickstart: failed (exit status 3)" in done.stderr
    assert "serving Cache|Posix" in done.stderr, "the daemon's log"
    assert "bit for bit" not in done.stdout
    check_nothing_is_left(done.stdout, temporary)


# setup and test


class Tree:
    """A copy of the scripts with a .venv whose programs write what they are asked into `calls`.

    What is named in the environment variable FAIL fails: a program, `code` (Python's, from stdin), `pip` or `pytest`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._calls = root / "calls"
        shutil.copytree(ROOT / "scripts", root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", root)
        self.bin = root / ".venv/bin"
        self.bin.mkdir(parents=True)
        for program in ("python", "ucmfs", "ruff", "mypy", "lint-imports"):
            self._program(
                program,
                f"""#!/bin/bash
                echo "{program} $*" >> {self._calls}
                case "$*" in
                    -) name=code ;;
                    "-m pip install "*) name=pip ;;
                    "-m pytest "*) name=pytest ;;
                    *) name={program} ;;
                esac
                [[ $FAIL != "$name" ]]
                """,
            )
        self._program("pip", f"#!{self.bin}/python\n")

    def _program(self, name: str, text: str) -> None:
        (self.bin / name).write_text("\n".join(line.strip() for line in text.splitlines()) + "\n")
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *arguments: str, status: int = 0, fail: str = "") -> str:
        return run(self.root / "scripts" / script, *arguments, status=status, FAIL=fail).stdout

    def calls(self) -> list[str]:
        """What the programs were asked since the last time."""
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return calls

    def installed(self) -> list[str]:
        """What pip was asked to install since the last time."""
        return [call.split("--no-input ")[1] for call in self.calls() if " pip install " in call]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_setup_installs_once(tree: Tree) -> None:
    assert "installing ucmfs" in tree.run("setup")
    assert tree.installed() == ["-e ."]
    assert "nothing to install" in tree.run("setup")
    assert tree.installed() == []


def test_setup_installs_again_when_what_is_wanted_changed(tree: Tree) -> None:
    tree.run("setup")
    with (tree.root / "pyproject.toml").open("a") as file:
        file.write("\n")
    tree.calls()
    tree.run("setup")
    assert tree.installed() == ["-e ."]


def test_setup_installs_more_when_more_is_asked(tree: Tree) -> None:
    engines = tree.root / "tests/engines/requirements.txt"
    engines.parent.mkdir(parents=True)
    engines.touch()
    tree.run("setup")
    tree.calls()
    tree.run("setup", "--torch", fail="code")
    assert tree.installed() == ["torch==2.13.0", "-e .[torch]"]
    tree.run("setup", "--dev")
    assert tree.installed() == ["-e .[dev]", "--no-deps -r tests/engines/requirements.txt"], "torch is there"
    for smaller in ([], ["--torch"], ["--dev"]):
        tree.run("setup", *smaller)
    assert tree.installed() == []


def test_setup_does_not_believe_an_installation_that_failed(tree: Tree) -> None:
    tree.run("setup", status=1, fail="pip")
    tree.calls()
    tree.run("setup")
    assert tree.installed() == ["-e ."]


def test_setup_refuses_what_it_does_not_know(tree: Tree) -> None:
    assert "usage: scripts/setup" in run(tree.root / "scripts/setup", "--devel", status=2).stderr
    assert tree.calls() == []
    assert "usage: scripts/setup" in tree.run("setup", "--help")


def test_test_installs_checks_and_hands_its_arguments_on(tree: Tree) -> None:
    tree.run("test", "tests/client", "-k", "load or dump")
    calls = tree.calls()
    assert any("pip install" in call for call in calls)
    assert calls[calls.index("ruff check .") :] == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "lint-imports --no-logo",
        "python -m pytest -q tests/client -k load or dump",
    ]


@pytest.mark.parametrize("check", ["ruff", "mypy", "lint-imports"])
def test_a_check_that_fails_fails_the_run_after_the_tests(tree: Tree, check: str) -> None:
    tree.run("test", status=1, fail=check)
    assert tree.calls()[-1] == "python -m pytest -q"


def test_tests_that_fail_fail_the_run(tree: Tree) -> None:
    tree.run("test", status=1, fail="pytest")
