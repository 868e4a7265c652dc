"""What a request may ask for."""

import pytest

from jdllm.decoding.sampling import SamplingParams
from jdllm.errors import JdllmError, RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gen_length", 0),
        ("gen_length", 1.5),
        ("gen_length", None),
        ("gen_length", True),
        ("steps", 0),
        ("steps", -4),
        ("block_length", 0),
        ("block_length", "8"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("cfg_scale", -1.0),
        ("cfg_scale", float("inf")),
        ("remasking", "entropy"),
        ("confidence_eos_eot_inf", "yes"),
        ("confidence_eos_eot_inf", True),
        ("prompt_masks", "fill"),
        ("confidence_dtype", "bfloat16"),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
    ],
)
def test_a_bad_value_is_named_with_its_field(field: str, value: object):
    with pytest.raises(RequestError, match=f"^{field} is .*expected"):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


def test_every_request_error_is_a_jdllm_error():
    assert issubclass(RequestError, JdllmError)


def test_integers_are_numbers_too():
    assert SamplingParams(temperature=1, cfg_scale=2, seed=2**64 - 1).temperature == 1
