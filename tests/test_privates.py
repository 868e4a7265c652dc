"""Tests and benchmarks use what the package offers: they read no private names of its objects and modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("tests", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}
FOREIGN = {
    "tests/pallas/triton_interpreter.py": {"_patch_lang_tensor"},  # of Triton
    "tests/planning/fake_drivers.py": {"_obj"},  # of ctypes
}
BY_NAME = ("getattr", "setattr", "delattr")


def private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.endswith("__") and last not in OF_NAMED_TUPLES


def used_names(tree: ast.AST) -> Iterator[str]:
    """The names that a file reads, imports or replaces, beside those of its own objects."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(module=module, names=names) if (module or "").startswith("jdllm"):
                yield from (name.name for name in names)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name in BY_NAME:
                yield from (
                    one.value
                    for one in args[:2]
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                )


def test_no_private_names_are_used_but_foreign_ones():
    found = {
        str(path.relative_to(ROOT)): set(filter(private, used_names(ast.parse(path.read_text()))))
        for path in FILES
    }
    assert {path: names for path, names in found.items() if names} == FOREIGN


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("engine.pool._arrays = 1", "_arrays"),
        ("patch.setattr(llm, '_parts', None)", "_parts"),
        ("patch.setattr('jdllm.module._LIMIT', 1)", "jdllm.module._LIMIT"),
        ("from jdllm.module import _LIMIT", "_LIMIT"),
        ("type(engine)._parts", "_parts"),
        ("self._own, cls._own, self.__class__.__name__, request._replace(id=1)", None),
    ],
)
def test_private_names_are_found(line: str, name: str | None):
    assert list(filter(private, used_names(ast.parse(line)))) == ([] if name is None else [name])
