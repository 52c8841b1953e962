"""A process that writes files in steps, each when it is told to.

A step is a line on standard input: `open PATH` (truncates), `join PATH` (does not), `write HEX COUNT` (the bytes HEX,
COUNT times), `close` or `rename OLD NEW`. Each is answered by a line: 0, or the errno that it met.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    fd = -1
    for line in sys.stdin:
        verb, *arguments = line.split()
        error = 0
        try:
            if verb == "open":
                fd = os.open(arguments[0], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            elif verb == "join":
                fd = os.open(arguments[0], os.O_WRONLY | os.O_CREAT, 0o666)
            elif verb == "write":
                data = bytes.fromhex(arguments[0]) * int(arguments[1])
                while data:
                    data = data[os.write(fd, data) :]
            elif verb == "close":
                os.close(fd)
            elif verb == "rename":
                os.replace(*arguments)
        except OSError as caught:
            error = caught.errno or -1
        print(error, flush=True)


if __name__ == "__main__":
    main()
