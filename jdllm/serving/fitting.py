"""Whether an executable, or a model, fits on the device beside all other arrays, asked before it runs."""

from jdllm.compiling.executables import Executable
from jdllm.errors import DoesNotFitError
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
    if room is None or (needed := sum(executable.needs)) <= room.device:
        return
    available = room.held + room.device
    raise MemoryBudgetError(what, room.held + needed, available, account.longest, "context without a cache")


def check_on_device(account: Account, model: str) -> None:
    """Raise `DoesNotFitError` where layers would be in host memory.

    Arguments:
    - `model`: the kind of model whose weights have to be on the device, for the message.
    """
    if account.offloaded:
        raise DoesNotFitError(
            f"the memory leaves no room for {account.offloaded} layers of this {model}, whose weights have to"
            " be on the device: raise memory"
        )
