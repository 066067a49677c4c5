"""Task `tools`: reading calls, the calculator, expressions in prose, samples, the reward, the turns."""

import json
import math
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.tools.calculator import BOUND, calculate, extract_expressions
from tasks.tools.calls import ALIASES, MOST_CALLS, TOOLS, parse_tool_calls, run_call, schema

ALLOWED = (*TOOLS, *ALIASES)
FEW = settings(max_examples=60, deadline=None)


def block(content) -> str:
    return f"<tool_call>{content if isinstance(content, str) else json.dumps(content)}</tool_call>"


def call_of(expression: str, name: str = "calculate_math") -> dict:
    return {"name": name, "arguments": {"expression": expression}}


def asked(text: str) -> list[tuple]:
    return [(call["name"], call["arguments"]) for call in parse_tool_calls(text)]


A, B = call_of("1+1"), call_of("2*3")
READ = [tuple(call.values()) for call in (A, B)]


# ---- calls in tags
@pytest.mark.parametrize("text", ['{"name": "f", "name": "f", "arguments": {"a": 1}}',
                                  '{"name": "f", "arguments": {"a": 0, "a": 1}}'])
def test_a_key_given_twice_is_read_but_not_canonical(text):
    assert parse_tool_calls(f"<tool_call>\n{text}\n</tool_call>") == [
        {"name": "f", "arguments": {"a": 1}, "canonical": False, "error": None}]


def test_a_canonical_call_is_read():
    assert parse_tool_calls(f"I call it.\n{block(A)}") == [{**A, "canonical": True, "error": None}]


@pytest.mark.parametrize("value", [
    {"name": "f", "arguments": json.dumps({"city": "New York"})},
    {"name": "f", "args": {"city": "New York"}},
    {"name": "f", "parameters": {"city": "New York"}},
    {"tool_name": "f", "arguments": {"city": "New York"}},
    {"function": {"name": "f", "arguments": {"city": "New York"}}},
    {"function": {"name": "f", "arguments": json.dumps({"city": "New York"})}},
    {"type": "function", "function": {"name": "f", "args": {"city": "New York"}}},
    {"id": 1, "name": "f", "arguments": {"city": "New York"}},
])
def test_other_spellings_are_read_but_not_canonical(value):
    (call,) = parse_tool_calls(block(value))
    assert (call["name"], call["arguments"]) == ("f", {"city": "New York"})
    assert call["error"] is None and not call["canonical"]


@pytest.mark.parametrize("content", [
    "", "{", "{'key': True, 'b': None}", "{'name': 'f', 'arguments': {1: 2}}", "{'name': f(), 'arguments': {}}",
    "{'name': 'f', 'arguments': {'x': 1j}}", "{'name': 'f', 'arguments': {**{}}}",
    "{'name': 'f' + 'g', 'arguments': {}}",
    "{'name': 'f', 'arguments': {'x': nan}}", "{'name': 'f', 'arguments': {'x': '\\x41'}}", "{'a': " * 50_000,
    "{'name': 'f', 'arguments': {'x': " + "9" * 5000 + "}}", "{name: 'f', arguments: {}}",
    "{'name': 'f', 'arguments': ",
    '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "1+1"}', '{"arguments": {}}', '{"name": 3, "arguments": {}}', "3", "[3]", "words",
    json.dumps(A) + "}", json.dumps({"name": "f", "arguments": json.dumps(json.dumps({"a": 1}))}), "[" * 5000,
])
def test_an_unreadable_block_is_one_error_not_silence(content):
    (call,) = parse_tool_calls(block(content))
    assert call["error"] and not call["canonical"] and call["arguments"] == {}
    assert run_call(call, ALLOWED).startswith("error: ")


LITERALS = [
    ("{'name': 'f', 'arguments': {'key': True, 'b': None, 'c': False}}", {"key": True, "b": None, "c": False}),
    ("{'name': 'f', 'arguments': {'expression': '1+1'}}", {"expression": "1+1"}),
    ("{'name': 'f', 'arguments': {'q': \"what's\", 'r': 'say \"hi\"', 's': 'it\\'s', 't': \"a\\'b\"}}",
     {"q": "what's", "r": 'say "hi"', "s": "it's", "t": "a'b"}),
    ("{'name': 'f', 'arguments': {'q': '</tool_call> {', 'r': [1, -2.5e3, [], {}]}}",
     {"q": "</tool_call> {", "r": [1, -2500.0, [], {}]}),
    ('{"name": "f", "arguments": {"a": true, \'b\': None,},}', {"a": True, "b": None}),
    ('{"name": "f", "arguments": {"code": "if x:\n\ty()"}}', {"code": "if x:\n\ty()"}),
    ("{'name': 'f', 'arguments': \"{'a': 1}\"}", {"a": 1}), ("{'name': 'f', 'arguments': {'é': '时间 \\u00e9 \\n'}}",
                                                          {"é": "时间 é \n"}),
]


@pytest.mark.parametrize("content, arguments", LITERALS)
def test_a_python_literal_is_read_but_is_not_canonical(content, arguments):
    first, second = parse_tool_calls(block(content) + block(A))
    assert first == {"name": "f", "arguments": arguments, "canonical": False, "error": None} and second["canonical"]
    assert all(type(first["arguments"][key]) is type(value) for key, value in arguments.items())


@FEW
@given(st.dictionaries(st.text(max_size=6), st.recursive(
    st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.text("a'\"{}[]:,</>\\ é时\n\t", max_size=8),
    lambda inner: st.lists(inner, max_size=3), max_leaves=6), max_size=3))
def test_what_python_writes_comes_back(arguments):
    (call,) = parse_tool_calls(block(repr({"name": "f", "arguments": arguments})))
    assert call["error"] or call["arguments"] == arguments  # an escape that only Python has (\\x00) is an error
    assert call["error"] is None or "\\x" in repr(arguments) or "\\U" in repr(arguments)


@pytest.mark.parametrize("text", [
    "what's the weather", "if (x) { log(y)", "</tool_call>", "<think>", 'a "quoted" {word', "<tool_call>{", "\\", "）",
    "a\nb",
])
def test_what_stands_in_an_argument_is_left_as_it_is(text):
    value = {"name": "search", "arguments": {"query": text}}
    assert parse_tool_calls(block(value) + block(A)) == [{**value, "canonical": True, "error": None},
                                                         {**A, "canonical": True, "error": None}]


@pytest.mark.parametrize("text", [
    block(A) + block(B),
    f"{block(A)}\nand then\n{block(B)}",
    block([A, B]),
    block(f"{json.dumps(A)}\n{json.dumps(B)}"),
    f"<tool_call>{json.dumps(A)}{block(B)}",
    f"<tool_call>\n{json.dumps(A)}\n<tool_call>{json.dumps(B)}",
])
def test_all_calls_of_a_turn_are_read_in_order(text):
    assert asked(text) == READ


@pytest.mark.parametrize("cut", range(len("<tool_call>"), len("<tool_call>" + json.dumps(A))))
def test_a_call_that_is_cut_off_is_reported_and_the_next_is_read(cut):
    first, second = parse_tool_calls(("<tool_call>" + json.dumps(A))[:cut] + block(B))
    assert first["error"] and second == {**B, "canonical": True, "error": None}


# ---- thoughts
@pytest.mark.parametrize("text", [
    f"<think>{block(A)}</think>", f"<think>{block(A)}", f"{block(A)}</think>", f"<think>a<think>{block(A)}</think>b",
    f"<think>{block(A)}</think>{block(A)}</think>", f"<think >{block(A)}",
    f"<think mode='x'>{block(A)}</think >", f"<THINK>\n{block(A)}", f"<thinking>{block(A)}</thinking>",
    "<think>calculate_math('1+1')", "calculate_math('1+1')</think>",
    f"use <tool_call> here <think>{block(A)}", f"<tool_call>{{<think>{block(A)}</think>",
    f"<think><tool_call></think></tool_call><think>{block(A)}",
])
def test_calls_in_a_thought_are_not_executed(text):
    assert A not in [{"name": name, "arguments": arguments} for name, arguments in asked(text)]
    assert READ[1] in asked(f"{text}</think>{block(B)}")


def test_calls_between_two_thoughts_count():
    assert asked(f"<think>{block(B)}</think>{block(A)}<think>{block(B)}</think>{block(B)}") == READ


# ---- function style
@pytest.mark.parametrize("text, expected", [
    ('calculate_math("1+1")', [("calculate_math", {"expression": "1+1"})]),
    ('calculator(expression="(1+2)*3")', [("calculator", {"expression": "(1+2)*3"})]),
    ("calculate_math((1+2)*3)", [("calculate_math", {"expression": "(1+2)*3"})]),
    ("calculate_math('if (x) { log(y)')", [("calculate_math", {"expression": "if (x) { log(y)"})]),
    ("calculate_math(“1+1”)", [("calculate_math", {"expression": "1+1"})]),
    ("calculator(expression = '2',)", [("calculator", {"expression": "2"})]),
    ("it's 5; calculate_math('3+4') isn't", [("calculate_math", {"expression": "3+4"})]),
    ("unit_converter(5, 'km', to_unit='mile')",
     [("unit_converter", {"value": 5, "from_unit": "km", "to_unit": "mile"})]),
    ("get_current_time() then calculate_math(\"2\")", [("get_current_time", {}), ("calculate_math",
    {"expression": "2"})]),
    ('say {"name":"Bingo","age":30}', []), ("the calculator (mine) and my_calculator(2)", []), ("log(2)", []),
])
def test_function_style_is_read_without_blocks(text, expected):
    calls = parse_tool_calls(text)
    assert [(call["name"], call["arguments"]) for call in calls if call["error"] is None] == expected
    assert not any(call["canonical"] for call in calls)


def test_function_style_is_not_read_beside_a_block():
    assert asked(f'{block(A)} calculate_math("2*3")') == READ[:1]


@pytest.mark.parametrize("text", [
    'calculate_math("1+1"', "calculate_math((1)", "calculate_math(1]", "calculator(1, 2)",
])
def test_a_broken_function_call_is_an_error(text):
    (call,) = parse_tool_calls(text)
    assert call["error"]


# ---- hostile text
WEARING = ["{", "<tool_call>", "<tool_call>{", '<tool_call>{"', '<tool_call>{"a":[', "<think>", "</think>", "<", "(",
           "<think><tool_call>", "calculator(", "calculator('", 'calculator("\\', "<tool_call>{}", "1+", "(1+", "sqrt(",
           "((1+2)", "1:", "1-1-", "1,", "-", "²", "log(1,", "2024-", "e", "[", "\\\"", "<tool_call>{<think>",
           "<tool_call>{'", "<tool_call>{'a':\"", "<tool_call>{'a':1,", "<tool_call>{'\\", "'", "<tool_call>{'a':'",
           "<tool_call ", "<think a", "2(", "2(3+4)", "(²", "(1+1)²(", "<tool_call>{'a':None,'b':["]


PIECES = [*WEARING, json.dumps(A), "</tool_call>", " ", "calculate_math", ")", '"', "x"]


@pytest.mark.parametrize("piece", WEARING)
def test_hostile_text_takes_linear_time(piece):
    text = piece * (100_000 // len(piece))
    start = time.process_time()
    assert len(parse_tool_calls(text)) <= MOST_CALLS and len(extract_expressions(text)) <= 8
    with pytest.raises(ValueError):
        calculate(text)
    assert time.process_time() - start < 2.5  # seconds; quadratic time would be minutes


@FEW
@given(st.lists(st.sampled_from(PIECES), max_size=12))
@example(["\ud800"])
def test_any_text_gives_calls_of_one_shape(pieces):
    for call in parse_tool_calls("".join(pieces)):
        assert set(call) == {"name", "arguments", "canonical", "error"}
        assert isinstance(call["name"], str) and isinstance(call["arguments"], dict)
        reply = run_call(call, ALLOWED)
        assert len(reply) <= 200 and reply.encode()


JSON = st.recursive(st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))


@FEW
@given(st.lists(st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=6), JSON, max_size=3)),
                min_size=1, max_size=3), st.booleans())
def test_what_was_written_as_json_comes_back(calls, ascii_):
    text = "\n".join(block(json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_)) for n, a in calls)
    assert [(c["name"], c["arguments"], c["canonical"]) for c in parse_tool_calls(text)] == [(*c, True) for c in calls]


# ---- the calculator
@pytest.mark.parametrize("text, value", [
    ("884+645*18", 12494),
    ("(289+532)*11", 9031),
    ("2^10", 1024),
    ("-2^2", -4),
    ("2**3**2", 512),
    ("7//2", 3),
    ("-7//2", -4),
    ("7%3", 1),
    ("sqrt(16)+2", 6),
    ("16.53/（21.630*2）", 16.53 / 43.26),
    ("５＋３×２", 11),
    ("８÷４－１", 1),
    ("2 ^ -1", 0.5),
    ("abs(-3)", 3),
    ("round(2.567, 2)", 2.57),
    ("log(8, 2)", 3),
    ("log(e)", 1),
    ("cos(pi)", -1),
    ("1e3+1", 1001),
    ("exp(0)", 1),
    ("+-+3", -3),
    (".5+.5", 1),
    ("  1 + 1 ", 2),
    ("2024 - 10 - 12", 2002),
    ("12×3÷4", 9),
    ("10**-1", 0.1),
])
def test_the_calculator_by_hand(text, value):
    assert calculate(text) == pytest.approx(value, rel=1e-12) and isinstance(calculate(text), float)


@pytest.mark.parametrize("text", [
    "10**10**10", "9**9**9", "1<<99999999", "factorial(999999)", "2**99999", "10**200*10**200", "exp(1000)", "1e999",
    "0**-1", "1/0", "1%0", "1//0", "sqrt(-1)", "log(0)", "(-8)**(1/3)", "²", "3²", "٣", "٣+1", "½", "2024-01-02",
    "2024/1/2", "2024-10-12", "12/10/2024", "", " ", "1,234", "1 2", "2(3)", "3x", "0x10", "1_000", "1j", "True",
    "None",
    "'a'", "[1]", "x", "x=1", "a.b", "(1).real", "abs", "abs()", "abs(1,2)", "abs(x=1)", "lambda: 1", "1 if 1 else 2",
    "1 and 2", "1==1", "~1", "1@2", "__import__('os')", "().__class__", "print(1)", "1;2", "1#2", "50%", "50%+3", "007",
    "round(1, 10**9)", "round(2.5, 0.5)", "1" * 257, "(" * 120 + "1" + ")" * 121, "1.2.3", "…", "\x00", "1+", "*1",
    "\ud800",
    "nan", "inf", "1e", "tan(1", "9" * 200 + "*" + "9" * 50 + "**3",
])
def test_what_is_no_bounded_arithmetic_is_refused_at_once(text):
    start = time.process_time()
    with pytest.raises(ValueError) as error:
        calculate(text)
    assert time.process_time() - start < 1 and 5 < len(str(error.value)) < 200


def test_the_calculator_refuses_what_is_not_text():
    with pytest.raises(ValueError):
        calculate(3)


TREES = st.recursive(st.integers(0, 10**6).map(str) | st.sampled_from(["pi", "e", "0.5"]), lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%",
    "**"]), inner).map(lambda t: f"({t[0]}{t[1]}({t[2]}))"),
    st.tuples(st.sampled_from(["sqrt", "abs", "exp", "round",
    "-"]), inner).map(lambda t: f"{t[0]}({t[1]})")), max_leaves=7)


@FEW
@given(TREES)
def test_a_value_is_the_one_python_gives_or_an_error(text):
    try:
        value = calculate(text)
    except ValueError:
        return
    assert math.isfinite(value) and abs(value) <= 10.0**BOUND
    known = {name: getattr(math, name) for name in ("sqrt", "exp", "pi", "e")} | {"abs": abs, "round": round}
    assert value == pytest.approx(float(eval(text, {"__builtins__": {}}, known)), rel=1e-9, abs=1e-12)  # our own text


@FEW
@given(st.text(max_size=40) | st.text("0123456789+-*/%^().e ", max_size=60))
def test_any_text_has_a_finite_value_or_a_reason(text):
    try:
        assert math.isfinite(calculate(text))
    except ValueError as error:
        assert str(error)


# ---- expressions in prose
@pytest.mark.parametrize("text, expected", [
    ("请计算884+645*18", ["884+645*18"]),
    ("(289+532)*11", ["(289+532)*11"]),
    ("What is sqrt(16)+2?", ["sqrt(16)+2"]),
    ("帮我算一下（２+３）×４，345+6。", ["(2+3)*4", "345+6"]),
    ("Compute 12 + 7, 3*4 and -5+3.", ["12+7", "3*4", "-5+3"]),
    ("42", []),
    ("about 3.5 of (5)", []),
    ("on 2024-01-02 at 12:30", []),
    ("2024/10/12到2024-10-13", []),
    ("-5", []),
    ("2+3和2+3", ["2+3"]),
    ("3+4=7", ["3+4"]),
    ("(1) 3+5\n- 4*2\n3. 1+1", ["3+5", "4*2", "1+1"]),
    ("1,234+5", ["1234+5"]),
    ("1+2，345+6", ["1+2", "345+6"]),
    ("((1+2)*3", ["(1+2)*3"]),
    ("log(8,2)+1", ["log(8,2)+1"]),
    ("3*-2", ["3*-2"]),
    ("3+5²", []),
    ("√16+2", []),
    ("3x+5=2", []),
    ("covid-19-5", []),
    ("version 1.2.3-4", []),
    ("x*3+5", []),
    ("1+", []),
    ("2^10 和 2**3", ["2^10", "2**3"]),
    ("abs(-5) pi*2", ["abs(-5)", "pi*2"]),
    ("٣5+2", []),
    ("2(3+4)", []),
    ("6÷2(1+2)", []),
    ("(1+2)3和5+6", ["5+6"]),
    ("(1)2+3 (2)4*5", ["2+3", "4*5"]),
    ("5+2(3+4)+1 and 7+8", ["7+8"]),
    ("2sqrt(16)+1", []),
    ("2pi+1", []),
    (" ".join(f"{i}+{i}," for i in range(1, 20)), [f"{i}+{i}" for i in range(1, 9)]),
])
def test_expressions_are_found_in_order(text, expected):
    assert extract_expressions(text) == expected


@FEW
@given(TREES.filter(lambda t: len(t) < 200).map(lambda t: f"1+{t}"),
       st.sampled_from(["请计算{}等于多少？", "Work out {}, please", "What is {}?", "{}"]))
def test_an_expression_is_found_whole_in_any_sentence(text, sentence):
    assert extract_expressions(sentence.format(text)) == [text]


# ---- the tools
@pytest.mark.parametrize("call, reply", [
    (call_of("2**100"), str(2**100)),
    (call_of("1/3"), "0.333333333333"),
    (call_of("6/3", "calculator"), "2"),
    (call_of("7", "python_math"), "7"),
    (call_of(7), "7"),
    ({"name": "unit_converter", "arguments": {"value": 5, "from_unit": "km", "to_unit": "miles"}}, "3.106856"),
    ({"name": "unit_converter", "arguments": {"value": "100", "from_unit": "Celsius", "to_unit": "F"}}, "212"),
    ({"name": "unit_converter", "arguments": {"value": 10, "from_unit": "pounds", "to_unit": "kg"}}, "4.535924"),
    ({"name": "unit_converter", "arguments": {"value": 1, "from_unit": "米", "to_unit": "英尺"}}, "3.28084"),
    ({"name": "get_current_time", "arguments": {"timezone": "Asia/Shanghai"}}, "2024-06-01 20:00"),
    ({"name": "get_current_time", "arguments": {}}, "2024-06-01 12:00"),
])
def test_a_tool_answers(call, reply):
    assert run_call({**call, "canonical": True, "error": None}, ALLOWED) == reply


@pytest.mark.parametrize("call", [
    call_of("10**10**10"),
    call_of("1+1", "rm"),
    {"name": "calculate_math", "arguments": {}},
    call_of(["1"]),
    call_of(None),
    {"name": "calculate_math", "arguments": {"expression": "1", "more": 2}},
    call_of("x" * 10**6),
    {"name": "unit_converter", "arguments": {"value": 5, "from_unit": "km", "to_unit": "kg"}},
    {"name": "unit_converter", "arguments": {"value": 5, "from_unit": "cubit", "to_unit": "kg"}},
    {"name": "unit_converter", "arguments": {"value": "9**9**9", "from_unit": "km", "to_unit": "km"}},
    {"name": "get_current_time", "arguments": {"timezone": "\ud800"}},
])
def test_a_wrong_call_is_an_error_that_the_model_sees(call):
    reply = run_call({**call, "canonical": True, "error": None}, ALLOWED)
    assert reply.startswith("error: ") and len(reply) <= 200 and reply.encode()


def test_a_schema_comes_from_signature_and_docstring():
    made = schema("unit_converter")["function"]
    assert made["parameters"]["required"] == ["value", "from_unit", "to_unit"]
    assert made["parameters"]["properties"]["value"]["type"] == "number" and "Convert" in made["description"]
    assert schema("calculator")["function"]["name"] == "calculator"
    assert "required" not in schema("get_current_time")["function"]["parameters"]


def test_rows_of_points_are_read_in_linear_time():
    """Quadratic reading of this text would take hours."""
    assert extract_expressions("." * 400_000 + " 3+4") == ["3+4"]
    assert extract_expressions("=." * 100_000 + "5+1") == [".5+1"]
    assert extract_expressions("wait....5+.5 and so on...") == [".5+.5"]


@pytest.mark.parametrize("number", ["1e999", "-1e400", "9" * 500, "9" * 5000])
def test_a_number_beyond_what_can_be_held_is_a_call_with_an_error(number):
    text = f'<tool_call>{{"name": "unit_converter", "arguments": {{"value": {number}}}}}</tool_call>'
    assert [bool(call["error"]) for call in parse_tool_calls(text)] == [True]
    assert "sys." not in parse_tool_calls(text)[0]["error"]


def test_the_largest_power_of_ten_may_stand_in_a_product():
    assert calculate("1e300*1e-300") == 1.0
