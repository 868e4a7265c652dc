"""How a model is loaded and run: one declaration for the library, the commands, the server and lm-eval."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from jdllm.arguments import positive
from jdllm.byte_sizes import DEFAULT_HOST_MEMORY, EXPECTED, parse_bytes, parse_host_memory
from jdllm.chunks import ChunkConfig
from jdllm.declarations import explain
from jdllm.errors import ConfigError

if TYPE_CHECKING:
    from jdllm.execution.module import Transformer

    Source = str | Path | Transformer
else:
    Source = Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
KERNELS = ("auto", "triton", "xla")
QUANTIZATIONS = ("int8", "int4", "uint4", "fp8")
KV_CACHE_DTYPES = ("auto", "fp8")


class Typed(NamedTuple):
    """Marks an option that commands have too.

    - `metavar`: how their help writes its value; `None` for a number, and for a switch, which has none.
    """

    metavar: str | None = None


def _count(value: object) -> int:
    try:
        return positive("", value, ConfigError)
    except ConfigError:
        raise PydanticCustomError("expected", "a positive integer") from None


def _bytes(parse: Callable[[Any], int]) -> PlainValidator:
    def check(value: object) -> object:
        try:
            parse(value)
        except ConfigError:
            raise PydanticCustomError("expected", EXPECTED) from None
        return value

    return PlainValidator(check)


def _one_of(names: tuple[str, ...]) -> PlainValidator:
    def check(value: object) -> object:
        if not isinstance(value, str) or value not in names:
            raise PydanticCustomError("expected", "one of {names}", {"names": ", ".join(map(repr, names))})
        return value

    return PlainValidator(check)


def _source(value: object) -> object:
    if not isinstance(value, str | Path):
        from jdllm.execution.module import Transformer  # Flax takes long to import: paths do without it

        if not isinstance(value, Transformer):
            raise PydanticCustomError("expected", "str or Path or Transformer")
    return value


def _chunks(value: object) -> object:
    if not isinstance(value, ChunkConfig):
        raise PydanticCustomError("expected", "ChunkConfig or None")
    return value


_Source = Annotated[Source, PlainValidator(_source)]
_Count = Annotated[int, BeforeValidator(_count), Field(ge=1)]
_Bytes = Annotated[int | str, _bytes(parse_bytes)]
_Quantization = Annotated[str, _one_of(QUANTIZATIONS)]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True))
class EngineOptions:
    """Arguments of `LLM`.

    Model
    - `model`: a Hugging Face checkpoint directory or hub id, a GGUF file, or a `Transformer` that is already
      in memory.
    - `dtype` ("auto"): type of the weights, or auto for the type of the checkpoint. Results equal the
      official sampler's token by token in float32 at temperature 0.
    - `hf_overrides` (`None`: none): values that replace values of `config.json`, for example a
      `rope_scaling` for longer contexts. A mapping such as `{"eos_token_id": 7}`.
    - `adapter` (`None`: none): the directory of a LoRA adapter in the format of PEFT. The adapter is merged
      into the weights as they are read, so steps are as fast as without.
    - `quantization` (`None`: none): keep the matrices of layers in 8 bits (int8), with a scale for each row,
      in 4 bits, with a scale for each 128 inputs of a row (int4), or with a scale and an offset for each 32
      (uint4), or in floats of 8 bits (fp8), with a scale for each row. Steps of more than 64 rows round
      activations to floats of 8 bits, too, where weights are fp8 and `dtype` has 16 bits, but not before
      experts. Matrices are rounded while they are loaded, or come from a checkpoint that has them so already
      (`jdllm convert --quantize`, and published ones whose numbers fit), which needs no option. Embedding,
      head, norms, biases and routers keep `dtype`, and products are computed in `dtype`. Steps of up to 2048
      rows on cards from Ampere on read the few bits of int8 and int4 alone, of experts steps of any size;
      other steps widen a matrix first. For one device.
    - `load_weights` (True): read the weights of checkpoints. False leaves the weights zero, which is enough
      for warming up executables that another process then finds in `cache_dir`.

    Memory
    - `memory` (`None`: the memory that XLA may allot): all memory of the device that may be used, for example
      24GiB. A number of bytes, or a text with a unit. The weights and the CUDA context are part of it. Every
      step is planned and compiled within this memory before the step runs.
    - `kv_pool` (`None`: the rest): the part of this memory for the pool of keys and values. The rest is the
      memory that weights and the largest step leave, and 1 GiB on a CPU without `memory`.
    - `kv_cache_dtype` ("auto"): type of the keys and values in the KV pool: that of the model (auto), or
      floats of 8 bits, which are approximate (fp8). Those of 8 bits (E4M3) have a scale for each row and
      key-value head, and the pool holds nearly twice the tokens of a model in 16 bits. A row is rounded
      alone, so tokens are the same in any company. Steps without a cache read no pool. The keys of a
      `verifier`, and keys in host memory, keep their type.
    - `host_memory` ("64GiB"): host memory that may be used if the device is too small. The memory is pinned;
      "0" is none. If the device has no room for the weights and a sequence of 4096 tokens, or of
      `max_context` if that is less, as many layers as fit stay there beside a KV pool for a step, and the
      other layers come to the device in every step. A small `kv_pool` lets more layers stay.
    - `max_num_batched_tokens` (`None`: chosen from the memory, 8192 to 36864): packed rows of one step over
      all requests (a longer request runs alone). By default the number is the largest one that leaves the KV
      pool 85 % of the room that it would have without steps. It is 8192 with a `verifier`, for a causal
      model, and on a CPU without `memory`. `LLM.account.rows` holds the number.
    - `max_context` (`None`: the rows of a step): the longest sequence that the KV pool leaves room for. A
      longer sequence without a cache takes the room of the pool: it runs while no request with a cache runs.
      With a cache the limit holds if the pool then still has room for a quarter as many rows.
    - `max_num_logits` (`None`: as many as fit): masked rows whose logits may exist at the same time. On a CPU
      without `memory` the default is 512.
    - `chunks` (`None`: planned): chunk counts for every step, instead of planned counts.

    Several cards
    - `devices` (1): cards on which each step runs at once. They are those of this machine, or as many of each
      process that has joined (`jdllm.distributed.join_processes`). Each card has a part of the weights and of
      the KV pool: equal parts of the heads and widths of the model, which must be multiples of the number. Of
      fewer key-value heads than cards each card has one. `memory` and `kv_pool` are those of each card, and
      each has the whole `verifier`. Not with layers in host memory. Tokens are those of one card, but for the
      order of sums.
    - `whole_layers` (`None`: if they take a quarter of `memory` at most): give each of several cards all
      layers too, beside its part of them. Full steps and refreshes of 512 rows or more then deal their rows
      out over the cards, which exchange keys and values instead of sums. By default not for causal and block
      models: they have other steps.

    Adaptive parallel decoding
    - `verifier` (`None`: none): autoregressive model for `transfer` "adaptive", such as Qwen2 for Dream. A
      checkpoint directory or hub id, which is loaded in the dtype of the model, or a `Transformer`. Its
      weights stay on the device beside the weights of the model, and count against `memory`. It must have the
      tokenizer of the model; either tokenizer may define further ids after the common ids.
    - `verifier_shares_ids` (False): take vocabularies of different sizes to agree up to the end of the
      smaller one. Needed if not both tokenizers are known (token ids only, or a `Transformer`).

    Self-speculation
    - `plain_drafts` (False): draft with the weights of the model alone, not with the adapter that its
      checkpoint brings for drafts (Nemotron-Labs-Diffusion). Tokens are the same.

    Executables
    - `kernels` ("auto"): kernels that may run, either the best for the card (auto), or only kernels in Triton
      (triton), or none (xla). Triton needs a card from Ampere on.
    - `cache_dir` ("auto": ~/.cache/jdllm/executables): the directory that keeps executables for the next
      process, which then need not compile them. The directory belongs to the user alone (mode 0700), and is
      made if there is none. "auto" follows `XDG_CACHE_HOME`; if nothing can be kept there, a warning says so.
      `None` keeps nothing.
    - `warmup` (False): compile everything at the start that requests of up to `max_num_batched_tokens` rows
      may need (8192 rows or more without a cache).
    - `trace` (`None`: none): a file for what the engine does, for Perfetto or chrome://tracing. The file
      tells when the device ran which parts, with their rows and padding, and for what each request waited.
    - `progress` (True): show a progress bar while loading and warming up. If standard error is no terminal, a
      line appears every 10 s.

    Raises `ConfigError` for a value that no model can have.
    """

    model: _Source
    _: KW_ONLY
    dtype: Annotated[str, _one_of(DTYPES), Typed("|".join(DTYPES))] = "auto"
    hf_overrides: Annotated[Mapping[str, Any] | None, Typed("JSON")] = None
    adapter: Annotated[str | Path | None, Typed("DIR")] = None
    quantization: Annotated[_Quantization | None, Typed("|".join(QUANTIZATIONS))] = None
    load_weights: bool = True
    memory: Annotated[_Bytes | None, Typed("BYTES")] = None
    kv_pool: Annotated[_Bytes | None, Typed("BYTES")] = None
    kv_cache_dtype: Annotated[str, _one_of(KV_CACHE_DTYPES), Typed("|".join(KV_CACHE_DTYPES))] = "auto"
    host_memory: Annotated[int | str, _bytes(parse_host_memory), Typed("BYTES")] = DEFAULT_HOST_MEMORY
    max_num_batched_tokens: Annotated[_Count | None, Typed()] = None
    max_context: Annotated[_Count | None, Typed()] = None
    max_num_logits: Annotated[_Count | None, Typed()] = None
    chunks: Annotated[ChunkConfig, PlainValidator(_chunks)] | None = None
    devices: Annotated[_Count, Typed()] = 1
    whole_layers: Annotated[bool | None, Typed()] = None
    verifier: Annotated[_Source | None, Typed("DIR_OR_HUB_ID")] = None
    verifier_shares_ids: Annotated[bool, Typed()] = False
    plain_drafts: Annotated[bool, Typed()] = False
    kernels: Annotated[str, _one_of(KERNELS), Typed("|".join(KERNELS))] = "auto"
    cache_dir: Annotated[str | Path | None, Typed("DIR|none")] = "auto"
    warmup: bool = False
    trace: Annotated[str | Path | None, Typed("FILE")] = None
    progress: bool = True

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from None


def check_devices(devices: int, host_memory: int | str) -> None:
    """Raise `ConfigError` for what several cards cannot do."""
    if devices == 1:
        return
    if host_memory != DEFAULT_HOST_MEMORY and parse_host_memory(host_memory):
        raise ConfigError(f"devices is {devices}, and host_memory is for a model on one: set it to 0")
