"""How many of a checkpoint's bytes are through, for a terminal or a caller."""

import contextlib
import functools
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) after every tensor."""


@contextlib.contextmanager
def reporter(progress: bool | Progress, total: int, title: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes of each tensor when it is done.

    Arguments:
    - `progress`: `True` draws a bar on stderr where that is a terminal; a function is called with bytes.
    - `total`: bytes in all.
    - `title`: of the bar.
    """
    if callable(progress):
        done = 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        yield report
        return

    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = (bars.TextColumn(title), bars.BarColumn(), bars.DownloadColumn())
    hidden = not (progress and console.is_terminal)
    with bars.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)
        yield functools.partial(bar.advance, task)
