"""`jdllm convert`: Hugging Face checkpoints to native ones, back, and the check of their checksums."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from jdllm.cli.prompt import read_text
from jdllm.engine_options import QUANTIZATIONS
from jdllm.errors import RequestError
from jdllm.json_files import numbered_lines, parse_object

if TYPE_CHECKING:
    from jdllm.quantised import WeightForm


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Checkpoint directory, GGUF file, or a hub id.", show_default=False
        ),
    ],
    target: Annotated[
        Path | None, typer.Argument(metavar="[DST]", help="Directory to make.", show_default=False)
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="native|hf", help="Format of DST. [default: the one that SRC does not have]"),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="auto|float32|bfloat16|float16", help="Cast weights; auto keeps their types."),
    ] = "auto",
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A LoRA adapter (PEFT) that is merged into the weights.", show_default=False
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(QUANTIZATIONS),
            help="Store the matrices of layers in 8 bits, with a scale for each row, in 4 bits, with a scale"
            " for each 128 inputs of a row (int4) or a scale and an offset for each 32 (uint4), or in"
            " floats of 8 bits.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --quantize: round by GPTQ, with text of the kind that the model will see. A *.jsonl"
            " file has a text in the field `text` of each line.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at DST.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the checksums of the native SRC, and write nothing.")
    ] = False,
) -> None:
    """Convert a checkpoint to the native format, or a native one back to Hugging Face safetensors.

    The native format is an Orbax checkpoint of the stacked weights, beside the configuration and the
    tokenizer. A conversion that was interrupted continues when the same command runs again.
    """
    from jdllm.checkpoints import conversion, native
    from jdllm.checkpoints.loading import resolve

    if to not in (None, "native", "hf"):
        raise RequestError(f"--to is {to!r}, expected native or hf")
    if quantize not in (None, *QUANTIZATIONS):
        raise RequestError(f"--quantize is {quantize!r}, expected {' or '.join(QUANTIZATIONS)}")
    if verify == (target is not None):
        raise RequestError("give SRC and DST, or --verify and SRC alone")
    path = resolve(source)
    to = to or ("hf" if native.is_native(path) and quantize is None else "native")
    if adapter is not None and (verify or to == "hf"):
        raise RequestError("--adapter is merged on the way to native only: the way back keeps the weights")
    if quantize is not None and (verify or to == "hf"):
        raise RequestError("--quantize rounds on the way to native only: the way back keeps the numbers")
    if calibrate is not None and quantize is None:
        raise RequestError("--calibrate says how --quantize rounds: give --quantize too")
    if target is None:
        manifest = native.compare_checksums(path, progress=True)
        typer.echo(f"{path}: {len(manifest.tensors)} tensors, {manifest.bytes:,} bytes, all intact")
        return
    if to == "native":
        manifest = conversion.to_native(
            path,
            target,
            dtype=dtype,
            overwrite=overwrite,
            progress=True,
            adapter=adapter,
            quantize=cast("WeightForm | None", quantize),
            calibrate=None if calibrate is None else _texts(calibrate),
        )
    elif dtype != "auto":
        raise RequestError("--dtype casts on the way to native only: the way back keeps the types")
    else:
        manifest = conversion.to_hf(path, target, overwrite=overwrite, progress=True)
    typer.echo(f"{target}: {len(manifest.tensors)} tensors, {manifest.bytes:,} bytes")


def _texts(file: Path) -> list[str]:
    """The text of a file, or the texts of the lines of a `*.jsonl` file."""
    if file.suffix != ".jsonl":
        return [read_text(file, "the text", "--calibrate")]
    texts = []
    for number, line in numbered_lines(file, RequestError):
        text = parse_object(line, Path(f"{file}, line {number}"), RequestError).get("text")
        if not isinstance(text, str):
            raise RequestError(f'{file}, line {number}: expected such as {{"text": "..."}}')
        texts.append(text)
    return texts
