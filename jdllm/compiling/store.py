"""Executables on disk, so that another process need not compile them."""

import contextlib
import hashlib
import os
import stat
import tempfile
import time
import warnings
from pathlib import Path

from jdllm.errors import ConfigError

DEFAULT_LIMIT = 2**31
"""Bytes that executables may take on disk: several models' ladders."""

_MAGIC = b"jdllm executable 1\n"
_SUFFIX, _PARTIAL = ".executable", ".partial"
_ABANDONED_SECONDS = 3600.0


def default_directory() -> Path:
    """The user's cache directory of executables."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jdllm" / "executables"


def default_store() -> "ExecutableStore | None":
    """A store in `default_directory`; `None`, and a warning, where nothing can be kept there."""
    try:
        store = ExecutableStore(default_directory())
        if not os.access(store.directory, os.W_OK):
            raise ConfigError(f"the directory of executables {store.directory} cannot be written")
    except (ConfigError, RuntimeError) as e:  # the latter where the user has no home
        warnings.warn(
            f"what is compiled is not kept: {e}", skip_file_prefixes=(str(Path(__file__).parents[1]),)
        )
        return None
    return store


class ExecutableStore:
    """Contents by key, in files of a directory that is the user's alone.

    Loading an executable runs code that its file names: who can write the file could run anything. So a
    directory that another user owns or may enter is refused. Damaged files count as absent. Several
    processes may use a directory at once.

    Arguments:
    - `directory`: made, with mode 0700, where it does not exist.
    - `limit_bytes`: what the files may take; those go first that were used least recently.

    Raises `ConfigError` for a directory that is not the user's alone or cannot be made.
    """

    def __init__(self, directory: Path, limit_bytes: int = DEFAULT_LIMIT):
        self.directory, self.limit_bytes = directory, limit_bytes
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            found = directory.lstat()
        except OSError as e:
            raise ConfigError(
                f"the directory of executables {directory} cannot be made: {e.strerror};"
                " name one that you may write"
            ) from e
        _check_owner(directory, found)

    def load(self, key: str) -> bytes | None:
        """The content last saved under `key`; `None` where there is none, or where it is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        content = data[start:]
        if data[:start] != _MAGIC + hashlib.sha256(content).digest():
            self.drop(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def save(self, key: str, content: bytes) -> bool:
        """Keep `content` under `key`, in place of older content; returns whether the disk took it."""
        data = _MAGIC + hashlib.sha256(content).digest() + content
        if len(data) > self.limit_bytes:
            return False
        try:
            with tempfile.NamedTemporaryFile(dir=self.directory, suffix=_PARTIAL, delete=False) as file:
                try:
                    file.write(data)
                    file.close()
                    os.replace(file.name, self._path(key))
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            self._bound()
        except OSError:
            return False
        return True

    def drop(self, key: str) -> None:
        """Forget the content under `key`."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"

    def _bound(self) -> None:
        """Remove the least recently used files, and unfinished files of stopped processes."""
        kept: list[tuple[float, int, Path]] = []
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):
                found = path.stat()
                if path.suffix == _SUFFIX:
                    kept.append((found.st_mtime, found.st_size, path))
                elif path.suffix == _PARTIAL and time.time() - found.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self.limit_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def _check_owner(directory: Path, found: os.stat_result) -> None:
    """Refuse a directory that is not the user's alone, naming the remedy."""
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        wrong, right = "is no directory", "remove it"
    elif found.st_uid != os.geteuid():
        wrong, right = f"belongs to user {found.st_uid}", "choose a directory of your own"
    elif mode & 0o077:
        wrong, right = f"has mode {mode:04o}", f"run chmod 700 {directory}"
    else:
        return
    raise ConfigError(
        f"the directory of executables {directory} {wrong}, and loading an executable runs code:"
        f" it has to be a directory that nobody else may enter (mode 0700); {right}"
    )
