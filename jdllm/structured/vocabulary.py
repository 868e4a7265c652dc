"""What a model can write: the bytes of its tokens, as the library of grammars takes them."""

from collections.abc import Sequence

from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig


class Vocabulary:
    """The tokens of a model.

    Arguments:
    - `tokenizer`: of the model.
    - `config`: the model.

    - `size`: how many ids the model has.
    - `stop_ids`: ids that end the text. They and other special tokens write nothing.
    - `tokenizer`: the same for the library of grammars.

    Raises `RequestError` where the model has no such id, and where the library llguidance is missing.
    """

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig):
        self.stop_ids, self.size = config.stop_ids, config.vocab_size
        if not self.stop_ids:
            raise RequestError(
                "structure needs an id that ends the text, and the checkpoint names none (eos_token_id)"
            )
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise RequestError(
                "structure needs the package llguidance: install the extra, as in pip install"
                " 'jdllm[structured]'"
            ) from None
        special = {*tokenizer.special_ids, *self.stop_ids, config.mask_id}
        tokens = [tokenizer.token_bytes(i) for i in range(self.size)]
        self._words = frozenset(token for i, token in enumerate(tokens) if token and i not in special)
        asked = _Tokens(tokens, [i for i in special if i is not None], self.stop_ids[0])
        self.tokenizer = LLTokenizer(TokenizerWrapper(asked))

    def writes(self, text: str) -> bool:
        """Whether some tokens, one after another, are this text."""
        data, words = text.encode(), self._words
        if all(bytes([byte]) in words for byte in set(data)):
            return True
        longest = max(map(len, words), default=0)
        reached = [True] + [False] * len(data)
        for end in range(1, len(data) + 1):
            starts = range(max(0, end - longest), end)
            reached[end] = any(reached[start] and data[start:end] in words for start in starts)
        return reached[-1]


class _Tokens:
    """What `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """Grammars are compiled so that nobody asks: any tokens may spell a text."""
        return []
