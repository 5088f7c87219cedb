"""A terminal of 80 columns: a pseudo-terminal, and the text that its screen shows."""

import contextlib
import os
import pty
import re
import select

ESCAPE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Terminal:
    """A pseudo-terminal whose keys are echoed, as in any shell. It is not that of a process: ^C is no signal.

    Attributes:
        file: what a program writes to.
    """

    def __init__(self, columns=80):
        self.columns, self.output = columns, b""
        self._main, replica = pty.openpty()
        self.file = os.fdopen(replica, "w", encoding="utf-8")

    def press(self, key):
        """Press a key and wait for its echo."""
        os.write(self._main, key)
        seen = len(self.output)
        while b"^" not in self.output[seen:]:
            assert self._read(5.0), "the terminal echoes nothing"

    def _read(self, seconds=0.0):
        if not select.select([self._main], [], [], seconds)[0]:
            return False
        self.output += os.read(self._main, 65536)
        return True

    def lines(self):
        """Return the lines on the screen, as an xterm shows them."""
        self.file.flush()
        while self._read():
            pass
        return show(self.output.decode(), self.columns)

    def close(self):
        self.file.close()
        with contextlib.suppress(OSError):
            os.close(self._main)


def show(text, columns):
    """Return the lines that an output leaves on a screen of unlimited height."""
    lines, row, column = [[]], 0, 0
    position = 0
    while position < len(text):
        character, escape = text[position], ESCAPE.match(text, position)
        position += 1
        if escape:
            position, count = escape.end(), int(escape[1]) if escape[1].isdigit() else 1
            if escape[2] == "A":
                row = max(row - count, 0)
            elif escape[2] == "K":
                assert escape[1] == "2"
                lines[row] = []
            else:
                assert escape[2] in "mhl", escape[0]  # colors, and the cursor shown or hidden
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        else:
            if column == columns:  # a full line wraps with the next character
                row, column = row + 1, 0
            lines += [[] for _ in range(row + 1 - len(lines))]
            lines[row] += " " * (column + 1 - len(lines[row]))
            lines[row][column] = character
            column += 1
        lines += [[] for _ in range(row + 1 - len(lines))]
    return ["".join(line).rstrip() for line in lines]
