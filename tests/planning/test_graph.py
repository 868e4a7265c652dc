"""Graph templates: sizes, lifetimes and live bytes against direct recomputation."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdllm.planning.graph import GraphTemplate, Size, ceil_div, dim, maximum, minimum

HIDDEN, KV_WIDTH, FFN_WIDTH, VOCABULARY, BF16, F32 = 4096, 4096, 12288, 126464, 2, 4


def llada_like(layers: int = 2) -> GraphTemplate:
    """A transformer in the manner of LLaDA-8B: `T` rows, `M` of them masked, and five chunk counts."""
    template = GraphTemplate("llada")
    rows, masked = dim("T"), dim("M")
    ffn_rows, query_rows = ceil_div(rows, dim("ffn")), ceil_div(rows, dim("query"))
    kv_rows, head_rows = ceil_div(rows, dim("kv")), ceil_div(masked, dim("logits"))
    template.add_input("tokens", rows * 4, keep=True)
    template.add_op("embed", ["tokens"], {"x": rows * HIDDEN * BF16})
    for layer in range(layers):
        name = f"layer{layer}"
        _attention(template, name, query_rows, kv_rows, rows)
        template.add_op(
            f"{name}.ffn.norm",
            ["x"],
            {f"{name}.ffn.in": ffn_rows * HIDDEN * BF16},
            scratch=ffn_rows * F32,
            owners=("ffn",),
        )
        for part in ("gate", "up"):
            wide = {f"{name}.{part}": ffn_rows * FFN_WIDTH * BF16}
            template.add_op(f"{name}.ffn.{part}", [f"{name}.ffn.in"], wide, owners=("ffn",))
        template.add_op(f"{name}.ffn.act", [f"{name}.gate", f"{name}.up"], owners=("ffn",))
        down = {f"{name}.down": ffn_rows * HIDDEN * BF16}
        template.add_op(f"{name}.ffn.down", [f"{name}.gate"], down, owners=("ffn",))
        template.add_op(f"{name}.ffn.add", [f"{name}.down", "x"], owners=("ffn",))
        template.add_barrier(f"{name}.ffn.end", ["x"])
    hidden = {"head.rows": head_rows * HIDDEN * BF16}
    template.add_op("head.gather", ["x"], hidden, owners=("logits",))
    logits = {"head.logits": head_rows * VOCABULARY * F32}
    template.add_op("head.product", ["head.rows"], logits, owners=("logits",))
    template.add_op(
        "head.reduce",
        ["head.logits"],
        {"head.best": masked * 16},
        scratch=head_rows * VOCABULARY * F32,
        owners=("logits",),
    )
    template.add_barrier("end", ["head.best", "x"])
    return template


def _attention(template: GraphTemplate, name: str, query_rows: Size, kv_rows: Size, rows: Size):
    heads = dim("heads")
    grouped = minimum(heads + -1, 1)
    template.add_op(
        f"{name}.kv.norm",
        ["x"],
        {f"{name}.kv.in": kv_rows * HIDDEN * BF16, f"{name}.k": rows * KV_WIDTH * BF16},
        owners=("kv",),
    )
    template.add_op(
        f"{name}.kv.project",
        [f"{name}.kv.in"],
        {f"{name}.v": rows * KV_WIDTH * BF16},
        scratch=kv_rows * KV_WIDTH * F32,
        owners=("kv",),
    )
    template.add_barrier(f"{name}.kv.end", ["x", f"{name}.k", f"{name}.v"])
    normed = {f"{name}.q.in": query_rows * HIDDEN * BF16}
    template.add_op(f"{name}.q.norm", ["x"], normed, owners=("query",))
    template.add_op(
        f"{name}.q.project",
        [f"{name}.q.in"],
        {
            f"{name}.q": query_rows * ceil_div(HIDDEN, heads) * BF16,
            # Groups of heads are gathered in a buffer that one pass over all heads does without.
            f"{name}.groups": query_rows * HIDDEN * BF16 * grouped,
        },
        owners=("query", "heads"),
    )
    template.add_op(
        f"{name}.attend",
        [f"{name}.q", f"{name}.k", f"{name}.v", f"{name}.groups"],
        {f"{name}.o": query_rows * ceil_div(HIDDEN, heads) * F32},
        scratch=query_rows * ceil_div(HIDDEN, heads) * (F32 + BF16),
        owners=("query", "heads"),
    )
    mixed = {f"{name}.mixed": query_rows * HIDDEN * BF16}
    template.add_op(f"{name}.mix", [f"{name}.o", f"{name}.groups"], mixed, owners=("query", "heads"))
    template.add_op(f"{name}.add", [f"{name}.mixed", "x"], owners=("query",))
    template.add_barrier(f"{name}.end", ["x", f"{name}.k", f"{name}.v"])


WHOLE = dict.fromkeys(("ffn", "query", "kv", "heads", "logits"), 1)
DIMS: tuple[str, ...] = ("a", "b", "c")
Expression = tuple[Size, Callable[[dict[str, int]], int]]


def expressions() -> st.SearchStrategy[Expression]:
    """Sizes, each with the same expression as a function of Python integers."""
    leaf = st.one_of(
        st.sampled_from(DIMS).map(lambda name: (dim(name), lambda dims: dims[name])),
        st.integers(1, 5000).map(lambda value: (dim("a") * 0 + value, lambda dims: value)),
    )
    forms = {
        "add": (lambda a, b: a + b, lambda x, y: x + y),
        "times": (lambda a, b: a * b, lambda x, y: x * y),
        "ceil": (ceil_div, lambda x, y: math.ceil(x / max(y, 1))),
        "max": (maximum, max),
        "min": (minimum, min),
    }

    def combine(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        def build(form: str, left: Expression, right: Expression) -> Expression:
            symbolic, integers = forms[form]
            divisor = maximum(right[0], 1) if form == "ceil" else right[0]
            return symbolic(left[0], divisor), lambda dims: integers(left[1](dims), right[1](dims))

        return st.builds(build, st.sampled_from(sorted(forms)), inner, inner)

    return st.recursive(leaf, combine, max_leaves=6)


@given(expressions(), st.lists(st.integers(1, 40), min_size=3, max_size=3))
def test_a_size_is_what_its_expression_gives(expression: Expression, values: list[int]):
    dims = dict(zip(DIMS, values, strict=True))
    size, direct = expression
    assert size.evaluate(dims) == direct(dims)
    assert size.dims <= set(DIMS)


def test_integers_stand_on_either_side():
    rows = dim("T")
    assert (3 * rows + 1).evaluate({"T": 5}) == 16
    assert (1 + rows * 3).evaluate({"T": 5}) == 16
    assert ceil_div(rows, 2).evaluate({"T": 5}) == 3
    assert ceil_div(7, rows).evaluate({"T": 5}) == 2
    assert maximum(rows, 7).evaluate({"T": 5}) == 7
    assert minimum(7, rows).evaluate({"T": 5}) == 5


@st.composite
def programs(draw) -> list[tuple[str, list[str], list[str]]]:
    """Operators as (kind, tensors read, tensors named), each reading what earlier ones named."""
    program, known = [], []
    for index in range(draw(st.integers(1, 12))):
        kinds = ["op", "input", "keep", "barrier"] if known else ["op", "input", "keep"]
        kind = draw(st.sampled_from(kinds))
        reads = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
        names = [f"t{index}.{i}" for i in range(draw(st.integers(0, 2)) if kind == "op" else 1)]
        program.append((kind, reads, names))
        if kind != "barrier":
            known += names
    return [*program, ("op", [], [])]


@given(programs(), expressions(), st.lists(st.integers(1, 30), min_size=3, max_size=3))
def test_live_bytes_are_those_of_a_program_walked_by_hand(program, expression, values):
    dims = dict(zip(DIMS, values, strict=True))
    template = GraphTemplate("random")
    uses: dict[str, list[int]] = {}
    ops, kept = 0, []
    for kind, reads, names in program:
        if kind in ("op", "barrier"):
            for name in reads:
                uses[name].append(ops)
            if kind == "op":
                template.add_op(f"op{ops}", reads, {name: expression[0] for name in names}, scratch=dim("a"))
                uses |= {name: [ops] for name in names}
                uses[f"scratch{ops}"] = [ops]
            else:
                template.add_barrier(f"op{ops}", reads)
            ops += 1
        else:
            template.add_input(names[0], expression[0], keep=kind == "keep")
            uses[names[0]] = [0]
            kept += [names[0]] * (kind == "keep")
    for name in kept:
        uses[name].append(ops - 1)

    def padded(name: str) -> int:
        value = dims["a"] if name.startswith("scratch") else expression[1](dims)
        return math.ceil(value / 256) * 256

    expected = [
        sum(padded(name) for name, at in uses.items() if min(at) <= op <= max(at)) for op in range(ops)
    ]
    graph = template.instantiate(dims)
    assert graph.live_bytes.tolist() == expected
    assert template.live_bytes(dims).tolist() == expected
    assert graph.lower_bound == max(expected)
    assert graph.peak_op == f"op{expected.index(max(expected))}"
    assert graph.average == pytest.approx(sum(expected) / ops)
    assert sorted(graph.sizes.tolist()) == sorted(map(padded, uses))


def test_many_configurations_at_once_are_each_alone():
    template = llada_like()
    dims = {**WHOLE, "T": 5000, "M": 777}
    counts = np.array([1, 2, 3, 50, 512, 9000])
    together = template.live_bytes({**dims, "ffn": counts, "heads": counts})
    for column, count in enumerate(counts.tolist()):
        alone = template.live_bytes({**dims, "ffn": count, "heads": count})
        assert together[:, column].tolist() == alone.tolist()


def test_a_template_grows_after_it_was_instantiated():
    template = GraphTemplate("growing")
    template.add_input("x", 256, keep=True)
    template.add_op("first", outputs={"y": 512})
    assert template.instantiate({}).live_bytes.tolist() == [768]
    template.add_op("second", ["y"], scratch=1)
    assert template.instantiate({}).live_bytes.tolist() == [768, 1024]


def test_the_counts_that_cut_a_tensor_are_known():
    graph = llada_like().instantiate({**WHOLE, "T": 100, "M": 10})
    cut_by = dict(zip(graph.tensors, graph.cut_by, strict=True))
    assert cut_by["layer0.gate"] == ("ffn",)
    assert cut_by["layer1.o"] == ("query", "heads")
    assert cut_by["layer1.k"] == cut_by["tokens"] == ()


def test_mistakes_in_a_template_are_named():
    template = GraphTemplate("model")
    template.add_op("first", outputs={"x": dim("T")})
    with pytest.raises(ValueError, match="model: operator 'first' exists"):
        template.add_op("first")
    with pytest.raises(ValueError, match="model: tensor 'x' exists"):
        template.add_op("second", outputs={"x": 1})
    with pytest.raises(ValueError, match="nothing before this wrote tensor 'y'"):
        template.add_barrier("third", ["y"])
    with pytest.raises(ValueError, match=r"no value for dimension 'T', got \['M'\]"):
        template.instantiate({"M": 1})
    with pytest.raises(ValueError, match="empty: a template needs at least one operator"):
        GraphTemplate("empty").instantiate({})
