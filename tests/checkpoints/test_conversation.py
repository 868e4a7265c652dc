"""Messages as clients and servers have them, and chat templates that know more or less of them."""

from pathlib import Path
from typing import Any

import pytest

from jdllm.checkpoints.conversation import Rendering
from jdllm.checkpoints.tokenizer import Tokenizer
from jdllm.errors import RequestError
from tests.checkpoints.test_tokenizer import loaded, save

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, null]}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "42"}

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
"""A template that shows any role."""
OBJECTS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "<{{ c.function.name }} {{ c.function.arguments.a[0] }}>{% endfor %}]{% endfor %}"
)
"""One that reads arguments as objects, as transformers documents them."""
TEXTS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "{{ '<' + c.function.name + ' ' + c.function.arguments + '>' }}{% endfor %}]{% endfor %}"
)
"""One that puts texts together, arguments among them."""
STRICT = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
SWITCH = PLAIN + "{% if think is defined and not think %}<no thinking>{% endif %}"
ANSWERED = PLAIN + "{% if add_generation_prompt %}[assistant:{% endif %}"


@pytest.fixture
def tokenizer(tmp_path: Path):
    def write(template: str) -> Tokenizer:
        save(tmp_path, template=template)
        return loaded(tmp_path)

    return write


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, [USER, CALLED, RESULT], "[user:hi][assistant:][tool:42]"),
        (PLAIN, [USER, {"role": "assistant"}, USER], "[user:hi][assistant:][user:hi]"),
        (PLAIN, [{"role": "function", "name": "f", "content": "3"}], "[function:3]"),
        (PLAIN, [{"role": "developer", "content": "x"}, USER], "[system:x][user:hi]"),
        ("{# developer #}" + PLAIN, [{"role": "developer", "content": "x"}], "[developer:x]"),
        (OBJECTS, [USER, CALLED, RESULT], "[user:hi][assistant:<add 1>][tool:42]"),
        (TEXTS, [USER, CALLED, RESULT], '[user:hi][assistant:<add {"a": [1, null]}>][tool:42]'),
        (STRICT, [USER, CALLED, RESULT], "[user:hi][assistant:][user:42]"),
        (
            PLAIN,
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "audio": None}],
            "[assistant:no]",
        ),
        (
            "{% for m in messages %}{{ m.reasoning_content }}|{{ m.name is defined }}{% endfor %}",
            [{"role": "assistant", "content": "4", "reasoning_content": "2+2", "name": None}],
            "2+2|False",
        ),
    ],
)
def test_a_template_gets_what_it_knows(tokenizer, template: str, messages: list[Any], expected: str):
    assert tokenizer(template).apply_chat_template(messages) == expected


def test_a_template_that_refuses_every_form_says_why(tokenizer):
    with pytest.raises(RequestError, match="refuses the messages: no such role"):
        tokenizer(STRICT).apply_chat_template([USER, {"role": "wizard", "content": "x"}])


def test_a_template_has_variables(tokenizer):
    switch = tokenizer(SWITCH)
    assert switch.apply_chat_template([USER]) == "[user:hi]"
    told = Rendering(chat_template_kwargs={"think": False})
    assert switch.apply_chat_template([USER], told) == "[user:hi]<no thinking>"
    assert switch.encode_chat([USER], told)[0] == "[user:hi]<no thinking>"


def test_special_tokens_in_variables_are_text(tokenizer):
    shown = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %} {{ x }}")
    told = Rendering(chat_template_kwargs={"x": "<|eot_id|>"})
    text, ids = shown.encode_chat([{"role": "user", "content": "hello"}], told)
    assert text == "hello <|eot_id|>"
    assert shown.token_id("<|eot_id|>") not in ids


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "conversation", "messages", "return_dict"])
def test_settings_of_the_renderer_are_no_variables(tokenizer, name: str):
    with pytest.raises(RequestError, match=f"chat_template_kwargs has '{name}'"):
        tokenizer(PLAIN).apply_chat_template([USER], Rendering(chat_template_kwargs={name: "x"}))


def test_where_a_rendered_conversation_ends(tokenizer):
    answered = tokenizer(ANSWERED)
    begun = [USER, {"role": "assistant", "content": "4 is"}]
    assert answered.apply_chat_template([USER]) == "[user:hi][assistant:"
    assert answered.apply_chat_template([USER], Rendering(add_generation_prompt=False)) == "[user:hi]"
    continued = Rendering(continue_final_message=True)
    assert answered.apply_chat_template(begun, continued) == "[user:hi][assistant:4 is"
    assert answered.encode_chat(begun, continued)[0] == "[user:hi][assistant:4 is"
    assert answered.apply_chat_template(
        begun, Rendering(add_generation_prompt=False, continue_final_message=True)
    ) == ("[user:hi][assistant:4 is")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message ends in"),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1, expected True or False"),
        ({"continue_final_message": None}, "continue_final_message is None, expected True or False"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs is"),
    ],
)
def test_what_no_rendering_can_be(options: dict[str, Any], named: str):
    with pytest.raises(RequestError, match=named):
        Rendering(**options)
