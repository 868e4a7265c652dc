"""The documents list what rules and policies declare."""

from collections.abc import Iterator

import pytest

from jdllm.decoding.registry import Declared, cache_names, options, rule_names
from tests.helpers import ROOT

SAMPLERS, CACHING = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("samplers", "caching"))


def row(name: str, declared: Declared) -> str:
    option, users = declared
    used = "; ".join(
        f"`{field}` {', '.join(f'"{value}"' for value in values)}" for field, values in users.items()
    )
    default = f"`{option.default!r}`" if option.shown_default is None else option.shown_default
    return f"| `{name}` | {used} | {default} | {option.help} |"


def table() -> Iterator[str]:
    yield "| option | has an effect with | default | meaning |"
    yield "| --- | --- | --- | --- |"
    yield from (row(name, declared) for name, declared in options().items())


def test_the_table_of_options_is_that_of_the_declarations():
    shown = SAMPLERS.partition("<!-- options -->\n")[2].partition("<!-- /options -->")[0]
    assert shown.strip().splitlines() == list(table()), "\n".join(table())


@pytest.mark.parametrize("field", ["transfer", "alg"])
def test_every_rule_has_a_row(field: str):
    rows = [line for line in SAMPLERS.splitlines() if line.startswith("| ")]
    for name in rule_names(field):
        told = SAMPLERS if name == "adaptive" else "\n".join(rows)  # two models: a paragraph of its own
        assert f'"{name}"' in told or name == "schedule", name


def test_every_cache_has_a_row():
    assert all(f'| `cache="{name}"` |' in CACHING for name in cache_names() if name != "none")
