"""A progress bar of bytes on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def byte_bar(label: str, total: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """Gives the function that moves it on. `progress`: None shows it on terminals only."""
    console = Console(stderr=True)
    show = console.is_terminal if progress is None else progress
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=console.is_terminal, disable=not show) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)
