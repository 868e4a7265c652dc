"""What a checkpoint directory holds, read without jdllm."""

from pathlib import Path

from safetensors.numpy import load_file


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def tensors_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor, read by the safetensors library."""
    out = {}
    for file in directory.glob("*.safetensors"):
        for name, value in load_file(file).items():
            assert name not in out
            out[name] = (value.dtype.name, value.shape, value.tobytes())
    return out
