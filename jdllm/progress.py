"""How far a call has come, for a terminal."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from jdllm.serving.engine import StepUpdate
from jdllm.serving.request import Request


@contextlib.contextmanager
def shown(requests: Sequence[Request], progress: bool) -> Iterator[Callable[[StepUpdate], None]]:
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
        task = bar.add_task("", total=len(requests), tokens=0)
        tokens = 0

        def take(update: StepUpdate) -> None:
            nonlocal tokens
            tokens += int(update.committed.sum())
            bar.update(task, completed=sum(r.finished for r in requests), tokens=tokens)

        yield take
