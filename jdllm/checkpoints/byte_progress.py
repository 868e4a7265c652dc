"""How many of a checkpoint's bytes are through, for a terminal or a caller."""

import contextlib
import functools
from collections.abc import Callable, Iterator

from jdllm.lines import time_left, told_in_lines

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) after every tensor."""


@contextlib.contextmanager
def reporter(progress: bool | Progress, total: int, title: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes of each tensor when it is done.

    Arguments:
    - `progress`: `True` draws a bar on stderr where that is a terminal, and prints a line now and then where
      it is none; a function is called with bytes.
    - `total`: bytes in all.
    - `title`: of the bar.
    """
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if callable(progress):
            progress(done, total)

    if callable(progress) or not progress:
        yield report
        return

    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = (bars.TextColumn(title), bars.BarColumn(), bars.DownloadColumn())
    if not console.is_terminal:
        with told_in_lines(lambda seconds: _line(title, done, total, seconds)):
            yield report
        return
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield functools.partial(bar.advance, task)


def _line(title: str, done: int, total: int, seconds: float) -> str:
    read = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB after {seconds:.0f} s"
    return f"{title}: {read}, {time_left(done, total, seconds)}"
