"""A process that writes one file in the steps of a kind A writer, each when it is told to: `stepped_writer.py TMP FINAL`.

On standard input come bytes to write, as a line `write <hex digits> <count>`, or a bare `open`, `close` or `rename`. Each step
is answered by a line: `0`, or the errno that it met.
"""

from __future__ import annotations

import os
import sys


def main(temporary: str, final: str) -> None:
    fd = -1
    for line in sys.stdin:
        verb, *arguments = line.split()
        error = 0
        try:
            if verb == "open":
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            elif verb == "join":
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            elif verb == "write":
                pattern, count = arguments
                data = bytes.fromhex(pattern) * int(count)
                while data:
                    data = data[os.write(fd, data) :]
            elif verb == "close":
                os.close(fd)
            else:
                os.replace(temporary, final)
        except OSError as caught:
            error = caught.errno or -1
        print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
