"""Schemas: what the checker takes, what it says, what it refuses at registration. The suite: `make schemas`."""

import re

import pytest
from support import alive, call_tool

from reference_server import TEXT, Server, compile_schema, takes

NUMBER, INTEGER, BOOLEAN = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
CHILDREN = {"type": "array", "items": {"$ref": "#/$defs/tree"}}
TREE = {"type": "object", "properties": {"value": INTEGER, "children": CHILDREN}}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def checks(schema, *values):
    """Whether each value fits the schema."""
    check = compile_schema(schema)
    return [check(value) is None for value in values]


# ---- what it says ----

CHECKS = [
    ({"type": "string"}, "", None),
    ({"type": "string"}, 1, " must be of type string"),
    ({"type": "string"}, None, " must be of type string"),
    (INTEGER, 42, None),
    (INTEGER, 42.0, None),
    (INTEGER, 42.5, " must be of type integer"),
    (INTEGER, True, " must be of type integer"),
    (INTEGER, "42", " must be of type integer"),
    (NUMBER, 1.5, None),
    (NUMBER, 1, None),
    (NUMBER, False, " must be of type number"),
    (BOOLEAN, True, None),
    (BOOLEAN, 1, " must be of type boolean"),
    ({"type": "null"}, None, None),
    ({"type": "null"}, False, " must be of type null"),
    ({"type": "array"}, [], None),
    ({"type": "array"}, {}, " must be of type array"),
    ({"type": "object"}, [], " must be of type object"),
    ({"type": ["string", "null"]}, None, None),
    ({"type": ["string", "null"]}, 1, " must be of type string or null"),
    ({"enum": ["a", 1]}, "a", None),
    ({"enum": ["a", 1]}, "b", ' must be one of "a", 1'),
    ({"enum": [1]}, True, " must be one of 1"),
    ({"enum": [True]}, 1, " must be one of true"),
    ({"type": "array", "items": INTEGER}, [1, 2], None),
    ({"type": "array", "items": INTEGER}, [1, "2"], "[1] must be of type integer"),
    (takes(a=TEXT), {"a": "x"}, None),
    (takes(a=TEXT), {}, ".a is required"),
    (takes(a=TEXT), {"a": 1}, ".a must be of type string"),
    (takes(a=TEXT), {"a": "x", "b": 1}, None),
    (takes({"b": INTEGER}, a=TEXT), {"a": "x"}, None),
    (takes({"b": INTEGER}, a=TEXT), {"a": "x", "b": "y"}, ".b must be of type integer"),
    (takes(a=TEXT) | {"additionalProperties": False}, {"a": "x", "b": 1}, ".b is not known here"),
    ({"type": "object", "additionalProperties": INTEGER}, {"x": "y"}, ".x must be of type integer"),
    (
        takes(a=takes(b={"type": "array", "items": takes(c=TEXT)})),
        {"a": {"b": [{"c": "d"}, {}]}},
        ".a.b[1].c is required",
    ),
]



@pytest.mark.parametrize(("schema", "value", "problem"), CHECKS)
def test_the_checker_finds_the_first_problem_and_names_its_place(schema, value, problem):
    """MUST (Tools › Security Considerations): validate all tool inputs; a boolean is no integer, 42.0 is one."""
    assert compile_schema(schema)(value) == problem


SAID = [
    ({"const": {"a": 1}}, 1, ' must be one of {"a": 1}'),
    ({"minimum": 1}, 0, " must be at least 1"),
    ({"maximum": 1}, 2, " must be at most 1"),
    ({"exclusiveMinimum": 1}, 1, " must be more than 1"),
    ({"exclusiveMaximum": 1}, 1, " must be less than 1"),
    ({"multipleOf": 2}, 3, " must be a multiple of 2"),
    ({"minLength": 2}, "a", " must have at least 2 characters"),
    ({"maxLength": 1}, "ab", " must have at most 1 characters"),
    ({"pattern": "^a"}, "b", " must match the pattern ^a"),
    ({"minItems": 1}, [], " must have at least 1 items"),
    ({"maxItems": 1}, [1, 2], " must have at most 1 items"),
    ({"uniqueItems": True}, [1, 1.0], " must have no two equal items"),
    ({"prefixItems": [INTEGER], "items": TEXT}, [1, 2], "[1] must be of type string"),
    ({"prefixItems": [INTEGER]}, ["a"], "[0] must be of type integer"),
    ({"items": False}, [1], "[0] is not known here"),
    ({"minProperties": 1}, {}, " must have at least 1 members"),
    ({"maxProperties": 0}, {"a": 1}, " must have at most 0 members"),
    ({"propertyNames": {"maxLength": 1}}, {"ab": 1}, ".ab must have at most 1 characters"),
    ({"properties": {"a": False}}, {"a": 1}, ".a is not known here"),
    ({"allOf": [INTEGER, {"minimum": 1}]}, 0, " must be at least 1"),
    ({"anyOf": [INTEGER, TEXT]}, None, " must fit one of anyOf (must be of type integer; must be of type string)"),
    ({"oneOf": [INTEGER, NUMBER]}, 1, " must fit exactly one of oneOf"),
    ({"not": TEXT}, "a", " must fit none of not"),
    (takes(a={"$ref": "#/$defs/t"}) | {"$defs": {"t": TEXT}}, {"a": 1}, ".a must be of type string"),
    (takes(tree={"$ref": "#/$defs/tree"}) | {"$defs": {"tree": TREE}},
     {"tree": {"children": [{"value": 1}, {"children": [{"value": "x"}]}]}},
     ".tree.children[1].children[0].value must be of type integer"),
]


@pytest.mark.parametrize(("schema", "value", "problem"), SAID)
def test_a_problem_is_said_in_words_that_a_model_can_act_on(schema, value, problem):
    """SHOULD (Tools › Error Handling): actionable feedback that language models can use to correct themselves."""
    assert compile_schema(schema)(value) == problem


# ---- what is equal, what is whole, what matches ----


@pytest.mark.parametrize("keyword", [lambda one: {"const": one}, lambda one: {"enum": ["x", one]}])
def test_values_are_compared_as_json_compares_them(keyword):
    """Choice: equality is JSON's: 1 is 1.0, true is not 1, members have no order; deep inside as well as outside."""
    assert checks(keyword(1), 1, 1.0, True, "1", [1]) == [True, True, False, False, False]
    assert checks(keyword(0), 0, -0.0, False, None, "") == [True, True, False, False, False]
    assert checks(keyword([True]), [True], [1], True) == [True, False, False]
    assert checks(keyword({"a": 1, "b": [2]}), {"b": [2.0], "a": 1.0}, {"a": 1}, {"a": True, "b": [2]}) == [
        True, False, False]
    assert checks(keyword(2**53 + 1), 2**53 + 1, 2**53, float(2**53)) == [True, False, False]
    assert checks(keyword(10**22), 1e22, 10**22 + 1) == [True, False]


def test_items_are_unique_as_json_compares_them():
    """Choice: the same equality tells twins."""
    assert checks({"uniqueItems": True}, [1, True], [1, "1"], [[1], [True]], [{"a": 1}, {"a": 2}], []) == [True] * 5
    assert checks({"uniqueItems": True}, [0, -0.0], [[1], [1.0]], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == [False] * 3
    assert checks({"uniqueItems": False}, [1, 1]) == [True]


def test_a_multiple_is_one_in_decimal_digits():
    """Choice: what is written is compared, because 0.0075 is a multiple of 0.0001 to everybody but a processor."""
    assert checks({"multipleOf": 0.0001}, 0.0075, 0.00751, 0, 1e300) == [True, False, True, True]
    assert checks({"type": "integer", "multipleOf": 0.123456789}, 1e308) == [False]
    assert checks({"multipleOf": 0.01}, 19.99, 19.999, 10**30) == [True, False, True]


def test_a_keyword_looks_at_its_own_types_only():
    """Choice: to JSON Schema `minLength` says nothing about a number."""
    every = {"minimum": 5, "minLength": 5, "minItems": 5, "minProperties": 5, "pattern": "x", "required": ["a"]}
    assert checks(every, None, True, False) == [True] * 3
    assert checks(every, 1, "a", [], {}) == [False] * 4
    assert checks({"maxLength": 1}, 12345, [1, 2, 3]) == [True, True]


def test_length_is_counted_in_characters():
    """RFC 8259 §7: a string is a sequence of characters; one beyond the basic plane is one."""
    assert checks({"maxLength": 2}, "\U0001f600\U0001f600", "abc") == [True, False]


@pytest.mark.parametrize(("pattern", "good", "bad"), [
    ("^a$", ["a"], ["a\n", "ab"]),
    ("a", ["bab"], ["b"]),
    (r"^[$]\$$", ["$$"], ["$", "$$\n"]),
    (r"^\d+$", ["12"], ["\u0661", "1\n"]),
    (r"[^]$]$", ["a"], ["$"]),
])
def test_a_pattern_means_what_it_means_to_a_client(pattern, good, bad):
    """Choice: as `re` has it, but `$` is the very end and a digit is ASCII, as clients in ECMAScript have it."""
    assert checks({"pattern": pattern}, *good, *bad) == [True] * len(good) + [False] * len(bad)


# ---- $ref ----


def test_a_reference_leads_into_the_definitions_and_may_come_back_below():
    """SHOULD (Overview › Composition-Keyword Resource Use): recursion that descends into the value ends with it."""
    schema = takes(tree={"$ref": "#/$defs/tree"}) | {"$defs": {"tree": TREE}}
    deep = {"value": 1}
    for _ in range(90):
        deep = {"children": [deep]}
    assert checks(schema, {"tree": deep}, {"tree": {"children": [{"value": "x"}]}}, {"tree": 1}) == [True, False, False]


def test_keywords_beside_a_reference_count_too():
    """Choice: in 2020-12 a `$ref` is a keyword like others."""
    schema = takes(a={"$ref": "#/$defs/some", "maxItems": 2}) | {"$defs": {"some": {"type": "array", "minItems": 1}}}
    assert checks(schema, {"a": [1]}, {"a": []}, {"a": [1, 2, 3]}) == [True, False, False]


def test_names_in_a_pointer_are_unescaped():
    """RFC 6901 §4: ~1 is a slash and ~0 a tilde; §6: in a URI, percent-encoding comes around that."""
    schema = {"$defs": {"a/b": INTEGER, "c~d": TEXT, "e%f": BOOLEAN}, "properties": {
        "one": {"$ref": "#/$defs/a~1b"}, "two": {"$ref": "#/$defs/c~0d"}, "three": {"$ref": "#/$defs/e%25f"}}}
    assert checks(schema, {"one": 1, "two": "", "three": True}, {"one": ""}, {"two": 1}, {"three": 1}) == [
        True, False, False, False]


LOOPS = [
    {"a": {"$ref": "#/$defs/a"}},
    {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    {"a": {"allOf": [{"$ref": "#/$defs/a"}]}},
    {"a": {"anyOf": [TEXT, {"not": {"oneOf": [{"$ref": "#/$defs/b"}]}}]}, "b": {"$ref": "#/$defs/a"}},
    {"a": {"properties": {"x": {"$ref": "#/$defs/b"}}}, "b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}},
]


@pytest.mark.parametrize("definitions", LOOPS)
@pytest.mark.parametrize("used", [True, False])
def test_a_reference_that_returns_to_itself_with_the_same_value_is_refused(definitions, used):
    """SHOULD (Overview › Composition-Keyword Resource Use): bounds, so that no schema keeps the checker for ever."""
    schema = {"type": "object", "$defs": definitions} | ({"properties": {"p": {"$ref": "#/$defs/a"}}} if used else {})
    with pytest.raises(ValueError, match="returns to itself without descending"):
        compile_schema(schema)


@pytest.mark.parametrize("pointer", [
    "#", "#/properties/a", "#/$defs/b", "#/$defs", "#/$defs/", "#/$defs/a/$defs/b", "#a", "other.json", "$defs/a", "",
    "https://example.com/schema", "http://169.254.169.254/latest", "#/definitions/a", "#/$defs/~1", "/$defs/a",
])
def test_a_reference_that_leads_elsewhere_is_refused(pointer):
    """MUST NOT (Overview › $ref Resolution): nothing is fetched; SHOULD: what cannot be resolved is refused."""
    schema = {"type": "object", "properties": {"a": {"items": {"$ref": pointer}}}, "$defs": {"a": {}}}
    with pytest.raises(ValueError, match=re.escape(f"input.properties.a.items.$ref: {pointer} ")):
        compile_schema(schema, "input")


# ---- what is refused ----

REFUSED = [
    ({"type": "text"}, ".type"),
    ({"type": ["string", "text"]}, ".type"),
    ({"type": []}, ".type"),
    ({"type": ["string", "string"]}, ".type"),
    ({"type": 1}, ".type"),
    ({"required": "a"}, ".required must be of type array"),
    ({"required": [1]}, ".required[0] must be of type string"),
    ({"required": ["a", "a"]}, ".required must have no two equal items"),
    ({"properties": []}, ".properties must be of type object"),
    ({"properties": {"b": 1}}, ".properties.b must be of type object or boolean"),
    ({"items": [TEXT]}, ".items must be of type object or boolean"),
    ({"prefixItems": []}, ".prefixItems must have at least 1 items"),
    ({"anyOf": []}, ".anyOf must have at least 1 items"),
    ({"oneOf": TEXT}, ".oneOf must be of type array"),
    ({"not": []}, ".not must be of type object or boolean"),
    ({"enum": "a"}, ".enum must be of type array"),
    ({"minimum": "1"}, ".minimum must be of type number"),
    ({"minLength": -1}, ".minLength must be at least 0"),
    ({"maxItems": 1.5}, ".maxItems must be of type integer"),
    ({"multipleOf": 0}, ".multipleOf must be more than 0"),
    ({"uniqueItems": 1}, ".uniqueItems must be of type boolean"),
    ({"pattern": "["}, ".pattern: unterminated character set"),
    ({"pattern": r"\\p{L}".replace("\\\\", "\\")}, ".pattern: bad escape"),
    ({"$schema": "http://json-schema.org/draft-07/schema#"}, ".$schema must be one of"),
    ({"$id": "https://example.com/inner"}, ".$id is not known here"),
    ({"$defs": {"x": {"type": "text"}}}, ".$defs.x.type"),
    ({"$defs": {"x": {"pattern": "("}}}, ".$defs.x.pattern: missing )"),
    ({"contentSchema": {"items": {"type": "text"}}}, ".contentSchema.items.type"),
    *[({keyword: argument}, f".{keyword} is not known here") for keyword, argument in {
        "unevaluatedProperties": False, "unevaluatedItems": False, "dependentRequired": {}, "dependentSchemas": {},
        "dependencies": {}, "contains": {}, "minContains": 0, "maxContains": 1, "patternProperties": {}, "if": {},
        "then": {}, "else": {}, "$dynamicRef": "#a", "$dynamicAnchor": "a", "definitions": {}, "additionalItems": False,
        "nullable": True, "minlength": 1, "$vocabulary": {}, "requried": ["a"],
    }.items()],
]
NESTS = [
    (lambda one: takes(a=one), "input.properties.a"),
    (lambda one: takes(a={"type": "array", "items": one}), "input.properties.a.items"),
    (lambda one: takes() | {"additionalProperties": one}, "input.additionalProperties"),
    (lambda one: takes() | {"allOf": [True, {"not": one}]}, "input.allOf[1].not"),
    (lambda one: takes() | {"$defs": {"d": one}}, "input.$defs"),
]


@pytest.mark.parametrize(("schema", "place"), REFUSED)
@pytest.mark.parametrize(("nest", "where"), NESTS)
def test_what_is_no_schema_or_cannot_be_checked_is_refused_with_its_place(schema, place, nest, where):
    """MUST (Overview › Schema Validation): valid by its dialect; Choice: an unchecked keyword would be a promise."""
    with pytest.raises(ValueError) as refused:
        compile_schema(nest(schema), "input")
    assert str(refused.value).startswith(where)
    assert place in str(refused.value)


@pytest.mark.parametrize("schema", [None, 1, "string", [], [TEXT]])
def test_what_is_neither_an_object_nor_a_boolean_is_no_schema(schema):
    """MUST (Tools › Tool): a valid JSON Schema object (not `null`)."""
    with pytest.raises(ValueError, match=r"^input must be of type object or boolean"):
        compile_schema(schema, "input")


def test_annotations_promise_nothing_and_register():
    """Choice: what JSON Schema calls an annotation is listed as it is; `format` is one."""
    schema = {
        "$schema": DIALECT, "$id": "https://example.com/s", "title": "t", "description": "d", "$comment": "c",
        "type": "object", "additionalProperties": False, "properties": {"a": {
            "default": 1, "examples": [1], "deprecated": True, "readOnly": True, "writeOnly": False, "format": "email",
            "contentMediaType": "text/plain", "contentEncoding": "base64", "contentSchema": {}, "$anchor": "here"}}}
    assert checks(schema, {"a": "no mail"}, {"b": 1}) == [True, False]


# ---- at a tool ----


@pytest.mark.parametrize("root", [True, False, {}, {"type": "array"}, {"type": ["object"]}, {"properties": {}}])
@pytest.mark.parametrize("own", [True, False])
def test_a_tool_takes_an_object(root, own):
    """MUST (Tools › Tool): an inputSchema whose root is of type object, also where the tool checks its arguments."""
    with alive(Server("s", "1")) as server, pytest.raises(ValueError, match=r"inputSchema"):
        server.tool("t", "", root, checks_own_arguments=own)


@pytest.mark.parametrize("output", [{"type": "array", "items": INTEGER}, INTEGER, True, {"anyOf": [TEXT, INTEGER]}])
def test_a_tool_may_give_anything(output):
    """MAY (Tools › Output Schema): an output schema of any type."""
    with alive(Server("s", "1")) as server:
        value = [1] if output == {"type": "array", "items": INTEGER} else 1
        server.tool("t", "", takes(), output_schema=output)(lambda arguments, request: {"structuredContent": value})
        assert call_tool(server, "t")["result"]["structuredContent"] == value


@pytest.mark.parametrize("part", ["input", "output"])
def test_a_tool_with_such_a_schema_is_refused_unless_it_checks_its_own_arguments(part):
    """Choice: `checks_own_arguments` is the way to use the rest of JSON Schema."""
    strict = takes(a={"type": "string", "contains": 1})
    schemas = {"input_schema": strict} if part == "input" else {"input_schema": takes(), "output_schema": strict}
    with alive(Server("s", "1")) as server:
        with pytest.raises(ValueError, match=rf"t's {part}Schema.properties.a.contains .*checks_own_arguments"):
            server.tool("t", "", **schemas)
        assert server.tools == {}
        server.tool("t", "", **schemas, checks_own_arguments=True)(lambda arguments, request: "ok")
        assert "result" in call_tool(server, "t", {"a": 1}) or part == "output"


def test_arguments_are_checked_by_every_keyword():
    """MUST (Tools › Security Considerations): validate all tool inputs; a failure names the argument."""
    schema = takes(size={"oneOf": [{"type": "integer", "minimum": 1}, {"const": "all"}]})
    with alive(Server("s", "1")) as server:
        server.tool("t", "", schema)(lambda arguments, request: "ok")
        assert call_tool(server, "t", {"size": "all"})["result"]["content"][0]["text"] == "ok"
        for size in (0, "some", None, True):
            result = call_tool(server, "t", {"size": size})["result"]
            assert result["isError"] is True
            assert result["content"][0]["text"].startswith("arguments.size must fit exactly one of oneOf"), size


def test_a_value_that_takes_too_many_steps_is_an_error_for_the_model(capsys):
    """MUST (Tools › Security Considerations): validate all tool inputs; none of them ends in a traceback."""
    layers = {"properties": {"a": {"$ref": "#/$defs/n"}}}
    for _ in range(20):
        layers = {"allOf": [layers]}
    deep = {}
    for _ in range(90):
        deep = {"a": deep}
    with alive(Server("s", "1")) as server:
        server.tool("t", "", takes(a={"$ref": "#/$defs/n"}) | {"$defs": {"n": layers}})(lambda arguments, request: "ok")
        result = call_tool(server, "t", {"a": deep})["result"]
    assert (result["isError"], result["content"][0]["text"]) == (True, "arguments are nested too deeply")
    assert "Traceback" not in capsys.readouterr().err


def test_the_demo_names_what_a_month_is(demo_month):
    """SHOULD (Tools › Error Handling): feedback that a model can act on; a month has a pattern and a description."""
    assert demo_month["description"]
    assert checks(demo_month, "2026-09", "2026-12", "May") == [True] * 3
    assert checks(demo_month, "2026-13", "2026-9", "2026-09\n", "", "may", "\u0662026-01", 9) == [False] * 7


@pytest.fixture
def demo_month():
    from reference_server import demo_server

    with alive(demo_server(0)) as server:
        yield server.tools["build_report"].definition["inputSchema"]["properties"]["month"]
