"""How far a call has come, for a terminal."""

import contextlib
from collections.abc import Callable, Iterator

from jdllm.serving.updates import Ended, Update


@contextlib.contextmanager
def shown(requests: int, progress: bool) -> Iterator[Callable[[Update], None]]:
    """Yields a function that takes each update; with `progress`, and where standard error is a terminal,
    a bar counts finished requests and committed tokens."""
    if not progress:
        yield lambda _: None
        return

    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        bars.TextColumn("generating"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("requests, {task.fields[tokens]} tokens"),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=requests, tokens=0)
        tokens = 0

        def take(update: Update) -> None:
            nonlocal tokens
            if isinstance(update, Ended):
                bar.advance(task)
            else:
                tokens += int(update.committed.sum())
                bar.update(task, tokens=tokens)

        yield take


@contextlib.contextmanager
def counted(what: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many are done; with `progress`, where standard error is a terminal,
    a bar shows them and the time."""
    if not progress:
        yield lambda _: None
        return

    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    columns = bars.TextColumn(what), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn()
    with bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
