"""Compiles what requests say of the form of their answers, and keeps it."""

import json
import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from jdllm.arguments import shortened
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.errors import RequestError
from jdllm.models.config import ModelConfig
from jdllm.structured.structure import Structure
from jdllm.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from jdllm.structured.matching import Grammar

KEPT = 128
"""Structures that are kept, the last used ones."""

LONGEST = 5.0
"""Seconds after which nobody waits for a structure any more."""

_COMPILING, _MATCHING = 2, 8
"""Threads that compile, and at most so many that compute masks."""

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


_WRITTEN = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
"""How JSON is written, whatever the schema says of it: as by Python's `json.dumps`, so that no answer is
spaces without end. Nothing that the library does not know is passed over."""


class Grammars:
    """The structures that requests of a model ask for, compiled beside the threads that ask.

    The last used ones are kept, those too that were refused. A structure has limits on its size, on the work
    of compiling it and on the work of each token.

    Arguments:
    - `tokenizer`, `config`: of the model.

    Any thread may ask.
    """

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig):
        self._tokenizer, self._config = tokenizer, config
        self._kept: OrderedDict[Structure, Future[Grammar]] = OrderedDict()
        self._made: Vocabulary | None = None
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._compiling = ThreadPoolExecutor(_COMPILING, thread_name_prefix="jdllm-grammar")
        matching = min(_MATCHING, os.cpu_count() or 1)
        self._matching = ThreadPoolExecutor(matching, thread_name_prefix="jdllm-mask")

    def compiled(self, structure: Structure) -> "Grammar":
        """A structure, ready to be matched.

        Raises `RequestError` for what is no JSON schema, regular expression or grammar, for parts of them
        that are not supported, for a text that the tokenizer cannot write, and where this takes too long.
        """
        vocabulary = self._vocabulary()
        with self._lock:
            found = self._kept.get(structure)
            if found is None:
                found = self._compiling.submit(self._compile, structure, vocabulary)
                self._kept[structure] = found
            self._kept.move_to_end(structure)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        try:
            return found.result(LONGEST)
        except TimeoutError:
            raise RequestError(
                f"structure has a {structure.kind} that takes longer than {LONGEST:g} s to compile: make it"
                " smaller"
            ) from None
        except RequestError as error:  # another one for each who asks: an error holds the frames it passed
            raise RequestError(str(error)) from None

    def _vocabulary(self) -> Vocabulary:
        """Made by who asks first, whom nobody refuses for the second or two that it takes."""
        with self._making:
            if self._made is None:
                self._made = Vocabulary(self._tokenizer, self._config)
            return self._made

    def _compile(self, structure: Structure, vocabulary: Vocabulary) -> "Grammar":
        from jdllm.structured.matching import Grammar, told

        for text in structure.choice or ():
            if not vocabulary.writes(text):
                raise RequestError(
                    f"structure has the choice {shortened(text)}, which the tokenizer cannot write: leave it"
                    " out"
                )
        try:
            return Grammar(_grammar_of(structure), vocabulary, self._matching)
        except ValueError as error:
            why = told(str(error))
            if structure.grammar is None:  # the place is one of the library's own text
                why = _PLACE.sub("", why)
            raise RequestError(f"structure has a {structure.kind} that {_why(why)}") from None


def _grammar_of(structure: Structure) -> str:
    """The structure as a grammar of the library, in which any tokens may spell a text.

    The library would otherwise write what a grammar forces as the tokenizer does, whose spaces depend on what
    stands before.
    """
    from llguidance import LLMatcher, regex_to_lark

    if structure.regex is not None:
        rules = f"start: /{regex_to_lark(structure.regex, '')}/"
    elif structure.grammar is not None:
        rules = structure.grammar
    elif structure.choice is not None:
        rules = f"start: {' | '.join(map(json.dumps, structure.choice))}"
    else:
        schema = json.loads(structure.json_schema or '{"type": "object"}')
        own = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        rules = f"start: %json {json.dumps(own | {'x-guidance': _WRITTEN})}"
    return LLMatcher.grammar_from_lark(f'{rules}\n%llguidance {{"no_forcing": true}}\n')


def _why(message: str) -> str:
    unsupported = _UNSUPPORTED.search(message)
    if unsupported:
        return f"uses {unsupported[1]}, which is not supported: leave it out"
    return f"cannot be used: {message}"
