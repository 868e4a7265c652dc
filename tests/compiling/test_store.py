"""Executables on disk: who may keep them where, and that they are those that were compiled."""

import dataclasses
import enum
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.compiling import key as executable_key
from jdllm.compiling import store as executable_store
from jdllm.compiling.executable import Program, finish, lower, to_bytes
from jdllm.compiling.executables import Executables
from jdllm.compiling.key import NotDescribedError, described, program_key
from jdllm.compiling.store import ExecutableStore, default_directory
from jdllm.decoding.encoded_trace import encoding
from jdllm.decoding.step import denoise
from jdllm.errors import ConfigError
from jdllm.execution.module import Transformer
from jdllm.layers import rms_norm
from jdllm.llm import LLM
from jdllm.models.config import ModelConfig
from jdllm.models.weights import Params
from tests.conftest import DEFAULT_STORE, KV_POOL, LLADA

X, WEIGHT = np.linspace(-2, 2, 7 * 13, dtype=np.float32).reshape(7, 13), np.ones(13, np.float32)


pytestmark = pytest.mark.usefixtures("no_compilation_cache")


@pytest.fixture
def store(tmp_path: Path) -> ExecutableStore:
    return ExecutableStore(tmp_path / "executables", 1 << 20)


class TestDirectory:
    def test_it_is_made_for_its_user_alone(self, tmp_path: Path):
        directory = tmp_path / "a" / "b"
        ExecutableStore(directory).save("key", b"content")
        assert oct(directory.stat().st_mode & 0o777) == oct(0o700)
        assert ExecutableStore(directory).load("key") == b"content"

    @pytest.mark.parametrize("mode", [0o755, 0o701, 0o720, 0o777])
    def test_one_that_others_may_enter_is_refused(self, tmp_path: Path, mode: int):
        tmp_path.chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}.*run chmod 700 {tmp_path}"):
            ExecutableStore(tmp_path)

    def test_one_of_another_user_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        tmp_path.chmod(0o700)
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(ConfigError, match=r"belongs to user.*a directory of your own"):
            ExecutableStore(tmp_path)

    @pytest.mark.parametrize("kind", ["file", "link"])
    def test_what_is_no_directory_is_refused(self, tmp_path: Path, kind: str):
        path = tmp_path / "it"
        path.touch() if kind == "file" else path.symlink_to(tmp_path)
        with pytest.raises(ConfigError, match="is no directory"):
            ExecutableStore(path)

    def test_one_that_cannot_be_made_is_named(self, tmp_path: Path):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"file/below cannot be made: .*; name one that you may write"):
            ExecutableStore(tmp_path / "file" / "below")

    @pytest.mark.parametrize("wrong", ["no directory", "read only", "others may enter"])
    def test_a_default_that_cannot_be_is_a_warning(
        self, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        home = tmp_path / "caches"
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        if wrong == "no directory":
            home.touch()
        else:
            kept = DEFAULT_STORE()
            assert kept is not None
            kept.directory.chmod(0o500 if wrong == "read only" else 0o755)
            # The superuser may write anywhere.
            monkeypatch.setattr(os, "access", lambda path, mode: os.stat(path).st_mode & 0o200 != 0)
        with pytest.warns(UserWarning, match=f"what is compiled is not kept: .*{home}"):
            assert DEFAULT_STORE() is None

    def test_the_default_is_in_the_cache_of_the_user(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
        assert default_directory() == Path("/caches/jdllm/executables")
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert default_directory() == Path("/home/somebody/.cache/jdllm/executables")


class TestFiles:
    def test_what_is_damaged_is_absent(self, store: ExecutableStore):
        store.save("key", b"content")
        (path,) = store.directory.iterdir()
        whole = path.read_bytes()
        for damaged in (b"", whole[:-1], whole[:10], whole + b"x", whole[:-1] + b"x", b"x" + whole[1:]):
            path.write_bytes(damaged)
            assert store.load("key") is None
            assert not path.exists()
        store.save("key", b"content")
        assert store.load("key") == b"content"

    def test_keys_are_told_apart_and_the_last_content_counts(self, store: ExecutableStore):
        for key, content in (("a", b"1"), ("b", b"2"), ("a", b"3")):
            store.save(key, content)
        assert [store.load(key) for key in ("a", "b", "c")] == [b"3", b"2", None]

    def test_those_used_least_recently_go_first(self, store: ExecutableStore):
        content = bytes(store.limit_bytes // 4)
        for age, key in enumerate("abc"):
            store.save(key, content)
            (newest,) = (p for p in store.directory.iterdir() if p.stat().st_mtime > 1e9)
            os.utime(newest, (100 + age, 100 + age))
        assert store.load("a") == content
        store.save("d", content)
        assert [key for key in "abcd" if store.load(key) is not None] == ["a", "c", "d"]

    def test_what_is_larger_than_the_bound_is_not_kept(self, store: ExecutableStore):
        store.save("small", b"1")
        assert not store.save("large", bytes(store.limit_bytes))
        assert store.load("small") == b"1"

    def test_what_a_stopped_process_left_is_removed(self, store: ExecutableStore):
        old, new = store.directory / "old.partial", store.directory / "new.partial"
        for path in (old, new):
            path.touch()
        os.utime(old, (100, 100))
        store.save("key", b"content")
        assert (old.exists(), new.exists()) == (False, True)

    def test_a_full_disk_is_no_error(self, store: ExecutableStore, monkeypatch: pytest.MonkeyPatch):
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        assert not store.save("key", b"content")
        assert not list(store.directory.iterdir())

    def test_many_write_and_read_at_once(self, tmp_path: Path):
        """Two stores over one directory, as two processes have; readers find a whole content or none."""
        contents = {f"{i}": bytes([i]) * (1000 + i) for i in range(8)}
        stores = [ExecutableStore(tmp_path / "shared", 5000) for _ in range(2)]

        def work(turn: int) -> bool:
            key = f"{turn % 8}"
            stores[turn % 2].save(key, contents[key])
            other = f"{turn * 5 % 8}"
            return stores[turn // 8 % 2].load(other) in (None, contents[other])

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(200)))
        assert sum(path.stat().st_size for path in stores[0].directory.iterdir()) <= 5000


def normed(executables: Executables, x: Any = X, eps: float = 1e-6) -> Any:
    return executables.call(rms_norm, x, WEIGHT, eps=eps)


class TestExecutables:
    def test_what_one_compiles_another_loads(self, store: ExecutableStore):
        first, second = Executables("cpu", store), Executables("cpu", store)
        expected = X / np.sqrt((X**2).mean(axis=1, keepdims=True) + 1e-6)
        for executables in (first, second):
            np.testing.assert_allclose(normed(executables), expected, rtol=1e-6)
        assert (first.compiled, first.loaded) == (1, 0)
        assert (second.compiled, second.loaded) == (0, 1)
        one, two = (e.compile(rms_norm, X, WEIGHT, eps=1e-6) for e in (first, second))
        assert one.needs == two.needs
        assert one.needs.results >= X.nbytes
        normed(second, jnp.asarray(X))
        normed(second, X[:5])
        normed(second, eps=1e-5)
        assert (second.compiled, second.loaded) == (3, 1)

    def test_what_cannot_be_loaded_is_compiled_again_and_replaced(self, store: ExecutableStore):
        expected = normed(Executables("cpu", store))
        (path,) = store.directory.iterdir()
        for content in (b"no pickle", b""):
            store.save(key_of(), content)
            executables = Executables("cpu", store)
            np.testing.assert_array_equal(normed(executables), expected)
            assert (executables.compiled, executables.loaded) == (1, 0)
            assert store.load(key_of()) not in (None, content)
            assert list(store.directory.iterdir()) == [path]

    def test_functions_of_others_are_not_kept(self, store: ExecutableStore):
        executables = Executables("cpu", store)
        executables.call(lambda x: 2 * x, X)
        assert executables.compiled == 1
        assert not list(store.directory.iterdir())

    def test_what_the_compilation_cache_had_is_not_kept(
        self, store: ExecutableStore, monkeypatch: pytest.MonkeyPatch
    ):
        def from_cache(*args: Any) -> Any:
            jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
            return finish(*args)

        monkeypatch.setattr("jdllm.compiling.executables.finish", from_cache)
        normed(Executables("cpu", store))
        assert not list(store.directory.iterdir())


def key_of(**changed: Any) -> str:
    program = Program(rms_norm, (X, WEIGHT), {"eps": 1e-6})
    key = program_key(program._replace(**changed), {}, "auto", tuple(jax.local_devices(backend="cpu")[:1]))
    assert key is not None
    return key


class TestKey:
    def test_everything_that_changes_an_executable_changes_its_key(self, monkeypatch: pytest.MonkeyPatch):
        keys = [
            key_of(),
            key_of(args=(X[1:], WEIGHT)),
            key_of(args=(X.astype(np.float64), WEIGHT)),
            key_of(args=(jnp.asarray(X), WEIGHT)),
            key_of(args=([X, WEIGHT],)),
            key_of(donate=("x",)),
            key_of(static={"eps": 1e-5}),
            key_of(static={"eps": 1}),
            key_of(function=encoding(rms_norm)),
        ]
        for name, value in (
            ("version_of", lambda _: "9"),
            ("sources", lambda: "0"),
            ("processor", lambda: ""),
        ):
            executable_key.environment.cache_clear()
            with monkeypatch.context() as patch:
                patch.setattr(executable_key, name, value)
                keys.append(key_of())
        executable_key.environment.cache_clear()
        assert len(set(keys)) == len(keys)
        assert key_of() == keys[0]

    def test_values_of_arrays_do_not(self):
        assert key_of(args=(2 * X, WEIGHT)) == key_of()

    def test_abstract_arguments_have_the_key_of_arrays(self):
        abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
        assert key_of(args=(abstract, WEIGHT)) == key_of(args=(jnp.asarray(X), WEIGHT))


class Level(enum.Enum):
    ONE, TWO = 1, 2


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Declared:
    x: Any


def test_values_are_described_apart():
    values = [None, 0, 0.0, False, "0", b"0", (0,), (0, 0), Pair(0, 0), Declared(0), Declared((0,))]
    values += [Level.ONE, Level.TWO, np.dtype("int32"), np.int32(0), frozenset({1, 2}), {"a": 1}, {"a": 2}]
    values += [rms_norm, encoding(rms_norm), encoding(denoise)]
    texts = list(map(described, values))
    assert len(set(texts)) == len(texts)
    assert texts == list(map(described, values))
    for value in (object(), np.zeros(3), [1], lambda: 1, np.sum):
        with pytest.raises(NotDescribedError):
            described((value,))


@pytest.mark.slow
def test_another_process_has_the_same_descriptions_and_loads_a_sort(tmp_path: Path, config: ModelConfig):
    """On a CPU the other way to serialise refuses sorts."""
    program = Program(lambda x: (jnp.sort(jnp.tanh(x @ x.T), axis=0), {"sum": x.sum()}), (X,), {})
    executable = finish(program, lower(program, {}))
    content = to_bytes(executable)
    assert content is not None
    (tmp_path / "content").write_bytes(content)
    code = f"""
import jax, numpy as np
from pathlib import Path
from jdllm.decoding.encoded_trace import encoding
from jdllm.compiling.executable import Program, from_bytes
from jdllm.compiling.key import described
from jdllm.decoding.step import denoise
from jdllm.models.hf_config import config_from_hf
x = np.linspace(-2, 2, 7 * 13, dtype=np.float32).reshape(7, 13)
content = Path({str(tmp_path / "content")!r}).read_bytes()
out, rest = from_bytes(content, Program(None, (x,), dict()), jax.devices()[:1])(x)
print(np.asarray(out).tobytes().hex(), list(rest))
print(described((encoding(denoise), config_from_hf({str(LLADA.directory)!r}))))
"""
    expected, _ = executable(X)
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=variables
    )
    assert run.stdout.splitlines() == [
        f"{np.asarray(expected).tobytes().hex()} ['sum']",
        described((encoding(denoise), config)),
    ]


def test_a_library_user_waits_for_the_compiler_once(
    config: ModelConfig, params: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second model stands for another process: it has nothing in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(executable_store, "default_store", DEFAULT_STORE)
    model, found = Transformer(config, params), []
    kept: list[dict[str, Any]] = [{}, {}, {"cache_dir": None}]
    for options in kept:
        with LLM(model, max_num_batched_tokens=64, kv_pool=KV_POOL, **options) as llm:
            llm.executables.call(rms_norm, X, WEIGHT, eps=1e-6)
            found.append((llm.executables.compiled, llm.executables.loaded))
    assert found == [(1, 0), (0, 1), (1, 0)]
    assert len(list((tmp_path / "jdllm" / "executables").iterdir())) == 1
