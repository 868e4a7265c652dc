"""How far a call or a start has come: a bar in a terminal, lines elsewhere."""

import contextlib
from collections.abc import Callable, Iterator

from jdllm.compiling.executables import Program, Progress
from jdllm.lines import time_left, told_in_lines
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


@contextlib.contextmanager
def warming(total: int, progress: bool) -> Iterator[Progress]:
    """Yields a function that takes how many programs are compiled or loaded, and the last of them; with
    `progress` a bar shows it where standard error is a terminal, and a line now and then where it is none."""
    from rich.console import Console

    if not progress or Console(stderr=True).is_terminal:
        with counted("compiling", total, progress) as take:
            yield lambda done, _: take(done)
        return
    done, last = 0, ""

    def note(count: int, program: Program) -> None:
        nonlocal done, last
        done, last = count, f" (the last one: {program.name})"

    def line(seconds: float) -> str:
        so_far = f"{done} of {total} executables{last} after {seconds:.0f} s"
        return f"compiling: {so_far}, {time_left(done, total, seconds)}"

    with told_in_lines(line):
        yield note
