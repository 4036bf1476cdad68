"""Tables of rich as Markdown text."""

import io

from rich.console import Console
from rich.table import Table


def render(table: Table) -> str:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().strip().splitlines()) + "\n"
