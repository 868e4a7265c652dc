import itertools
import json
import random
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jdllm.api.app import ROUTERS
from jdllm.api.bodies import MOST_ESCAPES, MOST_FIELDS, MOST_PARTS, MOST_VALUES, BodyRoute, check_size
from jdllm.api.errors import ApiError

PART = {"type": "image_url", "image_url": "x" * 12}
CHOICE = {"type": "choice", "options": ["abcdefghijkl"] * 256}
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "wrong parts of messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART] * 95}] * 2048},
    ),
    "wrong parts that are few enough": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART] * 8}] * 1500},
    ),
    "wrong parts of a response": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [PART] * 8}] * 1500},
    ),
    "options": ("/v1/infill", {"parts": ["a", *[CHOICE] * 1800]}),
    "wrong options": ("/v1/infill", {"parts": ["a", *[CHOICE | {"options": [1] * 256}] * 1800]}),
    "wrong ids": ("/v1/completions", {"prompt": [-1] * MOST_VALUES}),
    "many ids": ("/v1/completions", {"prompt": [1] * (4 << 20)}),
    "lists of wrong ids": ("/v1/completions", {"prompt": [[-1] * 200] * 2048}),
    "empty lists": ("/v1/completions", {"prompt": [[]] * (2 << 20)}),
    "metadata": ("/v1/completions", {"prompt": "a", "metadata": {str(i): 1 for i in range(30_000)}}),
    "unknown fields": ("/v1/completions", {"prompt": "a"} | {f"max_token_{i}": 1 for i in range(30_000)}),
    "unknown fields that are few enough": (
        "/v1/completions",
        {"prompt": -1} | {f"zzqwxyvk{i:03d}": 1 for i in range(MOST_FIELDS - 1)},
    ),
    "unknown fields of messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user"} | {f"zzqwxyvk{i:03d}": 1 for i in range(25)}] * 2048},
    ),
    "wrong tokens": ("/detokenize", {"tokens": ["a"] * 60_000}),
    "wrong answers": ("/v1/score", {"prompt": "a", "answers": [{}] * 60_000}),
    "line ends": ("/tokenize", {"prompt": "\n" * (MOST_ESCAPES + 1)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_soon_and_briefly(client: TestClient, name: str):
    path, body = HOSTILE[name]
    content = json.dumps(body).encode()
    began = time.monotonic()
    answer = client.post(path, content=content)
    assert time.monotonic() - began < 2
    assert answer.status_code == 400
    assert len(answer.content) < 1000


def _counts(value: Any) -> tuple[int, int]:
    """Values and parts of what is in a value, by their definitions."""
    if isinstance(value, str):
        return 0, 1
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [_counts(one) for one in (value.values() if isinstance(value, dict) else value)]
    values, parts = map(sum, zip(*inner, strict=True)) if inner else (0, 0)
    names = len(value) if isinstance(value, dict) else 0
    # A list opens, and has a comma less than elements.
    return values + 1 + max(len(value) - 1, 0), parts + 1 + names


def _random(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if kind < 0.5 or not depth:
        return "".join(draw.choices('ab\\"[]{},:\n é', k=draw.randrange(6000)))
    if kind < 0.6:
        return draw.randrange(10**6)
    items = [_random(draw, depth - 1) for _ in range(draw.randrange(12))]
    return items if kind < 0.8 else {f'{i},"\\': item for i, item in enumerate(items)}


@pytest.mark.parametrize("seed", range(4))
def test_sizes_are_counted_outside_of_texts(seed: int):
    draw = random.Random(seed)
    value = [_random(draw, 3) for _ in range(100)]
    body = json.dumps(value, ensure_ascii=bool(seed % 2), indent=seed // 2 or None).encode()
    assert len(body) > 1 << 20  # several stretches
    values, _ = _counts(value)
    check_size(body, values)
    with pytest.raises(ApiError, match=f"at most {values - 1} values"):
        check_size(body, values - 1)


def test_parts_are_counted():
    value = ['",['] * (MOST_PARTS - 1)
    assert _counts(value)[1] == MOST_PARTS
    check_size(json.dumps(value).encode(), MOST_VALUES)
    with pytest.raises(ApiError, match="texts, names, lists and objects"):
        check_size(json.dumps([*value, ""]).encode(), MOST_VALUES)


def test_fields_are_few(client: TestClient):
    fields = {str(i): 1 for i in range(MOST_FIELDS)}
    answer = client.post("/v1/completions", json=fields | {"prompt": "a"})
    assert f"{MOST_FIELDS + 1} fields" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_is_json_whatever_its_type_says(client: TestClient, kind: str | None):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = client.post("/tokenize", content=b'{"prompt": "12"}', headers=headers)
    assert answer.json()["count"] == 2
    wrong = client.post("/tokenize", content=b"prompt=12", headers=headers)
    assert wrong.json()["error"]["code"] == "invalid_json"


def test_every_route_reads_its_body_beside_the_loop():
    routes = list(itertools.chain.from_iterable(router.routes for router in ROUTERS))
    posts = [route for route in routes if "POST" in getattr(route, "methods", ())]
    assert posts
    for route in posts:
        assert isinstance(route, BodyRoute)
