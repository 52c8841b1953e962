"""Places in memory for tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["remove_cache"]


def remove_cache(directory: str | os.PathLike[str]) -> None:
    """Remove a Cache's directory and all that is in it; it, or one below it, may be a mount of its own."""
    for path in (*Path(directory).glob("*"), Path(directory)):
        while os.path.ismount(path):
            subprocess.run(["umount", "-l", str(path)], check=True)
    subprocess.run(["rm", "-rf", str(directory)], check=True)
