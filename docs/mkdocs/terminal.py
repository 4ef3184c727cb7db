"""Draw the output of a command, read from standard input, as an SVG picture of a terminal.

``FORCE_COLOR=1 COLUMNS=100 kvtier demo 2>&1 | python docs/mkdocs/terminal.py "kvtier demo" > demo.svg``
"""

import io
import re
import sys

from rich.console import Console
from rich.text import Text

_FONTS = re.compile(r"@font-face \{.*?\}\n", re.DOTALL)  # rich would load them from another host


def drawing(command: str, output: str) -> str:
    """Return the picture of a terminal in which ``command`` printed ``output``."""
    lines = [Text.from_ansi(line) for line in output.replace("\r\n", "\n").splitlines()]
    width = max(len(line) for line in lines)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title="", unique_id="terminal")
    return "\n".join(line.rstrip() for line in _FONTS.sub("", svg).splitlines()) + "\n"


if __name__ == "__main__":
    print(drawing(sys.argv[1], sys.stdin.read()), end="")
