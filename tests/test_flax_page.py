"""The snippets of docs/flax.md: they run, and the one that trains learns its task."""

import re
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.test_readme import blocks, run

SNIPPETS = [block.text for block in blocks("python", [ROOT / "docs" / "flax.md"])]
TRAINING = next(text for text in SNIPPETS if "nnx.Optimizer" in text)


def printed(snippet: str, directory: Path) -> str:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{snippet}"
    return run([sys.executable, "-W", "error", "-c", program], directory)


@pytest.mark.slow
def test_snippets(tmp_path: Path):
    logits, layers, shares = (printed(text, tmp_path) for text in SNIPPETS if text != TRAINING)
    assert logits == "b'46'\n"
    assert layers.splitlines()[-1] == "[52 54]"
    assert shares == "P(None, 'model', None)\n"


@pytest.mark.slow
def test_a_new_task_is_learnt(tmp_path: Path):
    assert len(TRAINING.splitlines()) <= 60
    said = printed(TRAINING, tmp_path)
    found = re.fullmatch(r"loss (\S+) before, (\S+) after\nexact (\S+) before, (\S+) after\n", said)
    assert found is not None, said
    loss_before, loss_after, exact_before, exact_after = map(float, found.groups())
    assert loss_after < 0.2 * loss_before
    assert exact_before < 0.1
    assert exact_after > 0.5
