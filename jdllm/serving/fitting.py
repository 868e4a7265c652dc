"""Whether an executable fits on the device beside all other arrays, asked before it runs."""

from jdllm.compiling.executables import Executable
from jdllm.planning.account import Account
from jdllm.planning.budget import MemoryBudgetError


def check_fits(account: Account, what: str, rows: int, executable: Executable) -> None:
    """Raise `MemoryBudgetError` for an executable that does not fit.

    Arguments:
    - `what`: the subject of the message.
    - `rows`: its packed rows, which say whether it runs beside the KV pool.
    - `executable`: with the weights among its arguments, and the pool where it reads or writes it.
    """
    room = account.step_room(rows)
    if room is None or (needed := sum(executable.needs) - account.arriving) <= room.device:
        return
    available = room.held + room.device
    raise MemoryBudgetError(what, room.held + needed, available, account.longest, "context without a cache")
