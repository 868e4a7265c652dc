"""What a request with a long context asks of Prefilling-dLLM: one declaration, as `SamplingParams` is."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from jdllm.declarations import explain, plain
from jdllm.errors import RequestError

_MOST = 2**24
_Count = Annotated[int, Field(ge=1, le=_MOST)]
_Rounds = Annotated[int, Field(ge=0, le=_MOST)]

ScoreMask = Literal["causal", "full", "none", "query_to_chunk"]
RetentionMask = Literal["causal", "none", "query_to_chunk"]
Build = Literal["full_mask", "full_query", "chunk_query", "chunk_only"]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Prefilling:
    """How a long context is cut, scored, thinned out and cached before the answer is denoised.

    The context becomes chunks. Each chunk is scored by itself, beside the instruction and the query; the best
    chunks are kept, in the order of the document. Their keys and values are computed once, and the answer is
    denoised against these. The defaults are the paper's main setting for Dream (preset "dream"). Every value
    of every field is exact: the published code has a switch of the same meaning, and tokens are equal in f32
    at temperature 0. Source: Prefilling-dLLM (menik1126/prefilling-dllm).

    Chunks
    - `chunk_length` (1024): tokens of a chunk.
    - `chunk_bos` (True): a chunk that does not begin with `bos_id` gets this token, and a full chunk loses
      its last token in exchange. False: chunks stay as they were cut.
    - `split_from_tail` (False): the first chunk is the short chunk instead of the last.
    - `bos_id` (`None`): the token that begins a chunk; by default from the tokenizer, else from config.json.
    - `chunks_kept` (4): chunks that are kept; a context with no more chunks keeps all.
    - `keep_first_chunk` (False): keep the first chunk too, beside the best chunks.

    Draft
    - `draft_length` (4): tokens of an answer that is drafted without the context.
    - `draft_rounds` (1): rounds after the first token, each of which fills the surest token; other tokens
      stay masked.
    - `draft_steps` (`None`): instead of rounds, fill as many tokens, less the first, at once. If rounds and
      steps are `None`, the whole draft is filled, by the request's threshold.

    Scores
    - `score` ("draft"): the mean log-probability of the query and of the draft; "query" drafts nothing.
    - `score_window` (`None`): score only as many of the last tokens of the query.
    - `score_unfilled` (False): score the remaining masks of the draft too, as tokens.
    - `score_mask` ("causal"): what a row sees. "full": rows of the chunk see the whole chunk and the
      instruction, other rows are causal; "query_to_chunk": everything, except that rows of the chunk do not
      see rows behind the chunk; "none": everything.

    Retention
    - `tokens_kept` (`None`): tokens of a chunk to keep; by default all.
    - `retention` ("global"): keep the same tokens everywhere; "per_head": each layer and key-value head keeps
      its own.
    - `retention_window` (8): last rows of the query whose attention counts; `retention_draft` (False): the
      draft stands behind the query here.
    - `retention_direction` ("query_to_chunk"): how much the query attends to the chunk's tokens, these
      tokens to the query ("chunk_to_query"), or the sum ("both").
    - `retention_mask` ("causal"): what a row sees. "query_to_chunk": everything, except that rows of the
      chunk do not see the query; "none": everything. The build "chunk_query" has the same mask.
    - `retention_pool` (7), `retention_pooling` ("max"): width and kind of the pool along the chunk.
    - `retention_rows` ("sum"), `retention_heads` ("sum"), `retention_layers` ("mean"): how the values
      of several rows are combined, of several heads after the pool, and of several layers.
    - `retention_depth` (`None`: all): how many of the first layers count, or of the last layers for a
      negative number.
    - `retention_keep` ("high"): the tokens with the highest values, or the lowest ("low").
    - `retention_instruction` (True): the instruction stands before the chunk here.
    - `keep_bos` (True): keep the first token of a chunk in any case. Without `chunk_bos` no token has such a
      right.

    Keys and values
    - `build` ("full_mask"): one evaluation of instruction, chunks, query and masks; all see each other;
      "full_query": without the masks; "chunk_query": each chunk after the instruction, by itself;
      "chunk_only": each chunk alone. The last two evaluate the query afterwards.
    - `chunk_positions` ("continuous"): the kept chunks follow one another; "reuse": all begin at the end of
      the instruction; "absolute": each chunk has its place in the document.
    - `query_positions` ("after_chunks"): the query follows as many whole chunks as are kept; "after_window":
      one chunk; "after_cache": the last used position.
    """

    chunk_length: Annotated[int, Field(ge=2, le=_MOST)] = 1024
    chunk_bos: bool = True
    split_from_tail: bool = False
    bos_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    chunks_kept: _Count = 4
    keep_first_chunk: bool = False
    draft_length: _Count = 4
    draft_rounds: _Rounds | None = 1
    draft_steps: _Count | None = None
    score: Literal["draft", "query"] = "draft"
    score_window: _Count | None = None
    score_unfilled: bool = False
    score_mask: ScoreMask = "causal"
    tokens_kept: _Count | None = None
    retention: Literal["global", "per_head"] = "global"
    retention_window: _Count = 8
    retention_draft: bool = False
    retention_direction: Literal["query_to_chunk", "chunk_to_query", "both"] = "query_to_chunk"
    retention_mask: RetentionMask = "causal"
    retention_pool: Annotated[int, Field(ge=1, le=255)] = 7
    retention_pooling: Literal["max", "mean"] = "max"
    retention_rows: Literal["sum", "mean"] = "sum"
    retention_heads: Literal["sum", "max"] = "sum"
    retention_layers: Literal["mean", "sum"] = "mean"
    retention_depth: Annotated[int, Field(ge=-_MOST, le=_MOST)] | None = None
    retention_keep: Literal["high", "low"] = "high"
    retention_instruction: bool = True
    keep_bos: bool = True
    build: Build = "full_mask"
    chunk_positions: Literal["continuous", "reuse", "absolute"] = "continuous"
    query_positions: Literal["after_chunks", "after_window", "after_cache"] = "after_chunks"

    @model_validator(mode="wrap")
    @classmethod
    def _explained(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise RequestError(f"prefilling: {explain(error, cls)}") from None

    @field_validator("*", mode="before")
    @classmethod
    def _plain_scalar(cls, value: object) -> object:
        return plain(value)

    def __post_init__(self):
        if self.draft_rounds is not None and self.draft_steps is not None:
            raise RequestError("prefilling: draft_rounds and draft_steps exclude each other: set one to None")
        if self.bos_id is not None and not self.chunk_bos:
            raise RequestError(
                f"prefilling: bos_id is {self.bos_id}, and with chunk_bos False no chunk begins with it:"
                " leave one of them out"
            )
        if self.tokens_kept is not None and self.tokens_kept > self.chunk_length:
            raise RequestError(
                f"prefilling: tokens_kept is {self.tokens_kept}, and a chunk has {self.chunk_length} tokens:"
                " keep fewer, or leave it out to keep all"
            )
        if self.retention_depth == 0:
            raise RequestError("prefilling: retention_depth is 0, expected some layers, or None for all")
        sees = self.retention_direction == "query_to_chunk" or self.retention_mask == "none"
        if self.tokens_kept is not None and not sees:
            raise RequestError(
                f"prefilling: retention_direction {self.retention_direction!r} asks how chunks attend to the"
                f" query, which retention_mask {self.retention_mask!r} hides from them: set it to 'none'"
            )

    @property
    def keeps_first_token(self) -> bool:
        """Whether the first token of a chunk is kept in any case: it begins the chunk, not the text in it."""
        return self.keep_bos and self.chunk_bos

    @property
    def drafted(self) -> int:
        """Tokens of an answer that is drafted."""
        return self.draft_length if self.score == "draft" else 0

    def kept_of(self, chunks: int) -> int:
        """How many of so many chunks are kept."""
        return min(self.chunks_kept + self.keep_first_chunk, chunks)

    def changed(self, **options: Any) -> Self:
        """A copy with other values; raises `RequestError` as the class itself does."""
        return type(self)(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | options)


Preset = Literal["dream", "dream_sparse", "ultrallada", "ultrallada_sparse", "official_sparse", "official"]

PRESETS: dict[Preset, Prefilling] = {
    "dream": Prefilling(),
    "dream_sparse": Prefilling(tokens_kept=512, retention_direction="both", retention_mask="none"),
    "ultrallada": Prefilling(chunks_kept=2, score="query", score_window=64),
    "ultrallada_sparse": Prefilling(
        chunks_kept=8,
        score="query",
        score_window=64,
        tokens_kept=512,
        retention_direction="both",
        retention_mask="none",
    ),
    "official_sparse": Prefilling(tokens_kept=512),
    "official": Prefilling(
        draft_length=16,
        draft_rounds=None,
        build="chunk_query",
        chunk_positions="reuse",
        query_positions="after_window",
    ),
}
"""The paper's main settings for Dream and UltraLLaDA, with all tokens of the chunks or half of them; the
sparse setting as the published code runs it; and the defaults of that code."""


def _read(value: object) -> object:
    """A preset by its name, settings from a mapping, and `Prefilling` or `None` as they are."""
    match value:
        case None | Prefilling():
            return value
        case str() if value in get_args(Preset):
            return PRESETS[cast(Preset, value)]
        case Mapping():
            fields = {str(key): part for key, part in value.items()}
            preset = fields.pop("preset", "dream")
            if preset in get_args(Preset):
                return PRESETS[cast(Preset, preset)].changed(**fields)
    presets = ", ".join(map(repr, PRESETS))
    raise PydanticCustomError(
        "expected", "Prefilling, its fields in a mapping, or one of {presets}", {"presets": presets}
    )


PrefillingLike = Annotated[
    Prefilling | None, BeforeValidator(_read, json_schema_input_type=Preset | Prefilling | None)
]
"""`Prefilling`, the name of a preset, or fields in a mapping, in which `preset` gives the others."""
