"""Progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TransferSpeedColumn


def shown(progress: bool | None, *columns: ProgressColumn) -> Progress:
    """A line of these columns, gone when it is done. `progress`: None shows it on terminals only."""
    console = Console(stderr=True)
    show = console.is_terminal if progress is None else progress
    return Progress(*columns, console=console, transient=console.is_terminal, disable=not show)


@contextmanager
def byte_bar(label: str, total: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """Gives the function that moves it on. `progress`: as in `shown`."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with shown(progress, *columns) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)
