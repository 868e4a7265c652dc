"""A picture of some tenths of a second of traces: what the device runs, and what each request waits for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.cases import case_parser
from benchmarks.quality.lost_tables import require_matplotlib
from benchmarks.recorded_trace import read_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Spans = Mapping[str, Sequence[dict[str, Any]]]

COLOURS = {"refresh": "tab:orange", "layers": "tab:orange", "reuse": "tab:blue"}
WAITS = "0.85"
"""Grey: a request waits."""


class Bar(NamedTuple):
    """A span in a line of the picture; `begin` and `seconds` count from the first arrival."""

    line: str
    what: str
    begin: float
    seconds: float


def bars_of(spans: Spans, at: float, seconds: float) -> list[Bar]:
    """What a part of a trace shows.

    Arguments:
    - `spans`: by process, as `read_spans` returns them.
    - `at`, `seconds`: the part's begin, from the first arrival, and its length.

    Returns bars of the device, and then of each request that is there meanwhile, in the order of arrival. A
    bar ends with the part.
    """
    zero = min(span["ts"] for span in spans["requests"])
    lines = [("device", span) for span in spans["device"]]
    requests = sorted(spans["requests"], key=lambda span: (span["args"]["id"], span["ts"]))
    lines += [(f"request {span['args']['id']}", span) for span in requests]
    bars = []
    for line, span in lines:
        begin = max(at, (span["ts"] - zero) / 1e6)
        end = min(at + seconds, (span["ts"] + span["dur"] - zero) / 1e6)
        if begin < end:
            bars.append(Bar(line, span["name"], begin, end - begin))
    return bars


def draw(axes: "Axes", bars: Sequence[Bar], title: str) -> None:
    """Draw bars, those of a line side by side."""
    lines = list(dict.fromkeys(bar.line for bar in bars))
    for bar in bars:
        colour = COLOURS.get(bar.what, WAITS)
        place = lines.index(bar.line) - 0.4, 0.8
        axes.broken_barh(
            [(bar.begin, bar.seconds)], place, facecolors=colour, edgecolors="white", linewidth=0.4
        )
    axes.set_yticks(range(len(lines)), lines)
    axes.invert_yaxis()
    axes.set_title(title)


def main(arguments: Sequence[str]) -> None:
    """Draw the same seconds of one or several traces that `jdllm serve --trace FILE` wrote.

    `python3 -m benchmarks trace_picture TRACE... --picture FILE [--titles TITLE...] [--at 60]`: the line of
    the device, and a line for each request. Blue is a reuse, orange a refresh, grey a wait, and white on the
    device's line is idle. Needs matplotlib (the `plot` extra).
    """
    parser = case_parser("trace_picture", main.__doc__, records=False)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path, required=True, help="where it goes, such as load.png")
    parser.add_argument("--titles", nargs="+", help="one for each trace, by default its file's name")
    parser.add_argument("--at", type=float, default=60.0, help="seconds behind the first arrival")
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args(arguments)
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(args.traces)), layout="constrained")
    titles = args.titles or [path.name for path in args.traces]
    for index, (path, title) in enumerate(zip(args.traces, titles, strict=True)):
        axes = figure.add_subplot(len(args.traces), 1, index + 1)
        draw(axes, bars_of(read_spans(path), args.at, args.seconds), title)
    axes.set_xlabel("seconds since the first arrival")
    figure.savefig(args.picture, dpi=100)
