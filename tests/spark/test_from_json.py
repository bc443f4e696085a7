"""Fields of payloads as Spark's own `from_json` gives them: compared with it, and the quick way with the one row by row."""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from penstock.errors import InvalidInput
from penstock.spark.json import times
from penstock.spark.json.from_json import CORRUPT, FromJson, java_double
from penstock.spark.json.loose_json import decoded
from penstock.spark.streams.rows import fields_of, quick_fields

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]


def _words(text: str) -> list[str]:
    return text.split()


LEAVES = [
    "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary", "decimal(20,2)", "decimal(3,1)",
    "decimal(2,2)", "decimal(38,10)", "date", "timestamp", "timestamp_ntz",
]  # fmt: skip
NUMBERS = _words("""1 0 -0 1.0 1.9 1e2 1E-7 200 -128 -129 32768 2147483648 9223372036854775807 9223372036854775808
 -9223372036854775809 123456789012345678901234567890 1e400 1e-400 -0.0 0.25 3.4028236e38 1.17549435E-38
 16777217 16777217.5 33554435
 0.30000001192092896 1234567.125 12345678.5 1e7 1.0E10 999999999999999999.99 1.005 -1.005 1.004999 99999999.995 0.005""")
TEXTS = _words("""a 1 1.5 1,234.5 NaN +INF -Infinity inf Infinity YQ== YQ YWJj YWJjYQ== 2026-01-31 2026-1-3 2026 2026-02
 2026-02-30 0000-01-01 -0001-01-01 12345-01-01 123 -5 0 -141428 -719163 2026-01-31T 2026-01-31x 2026-01-
 2024-02-29 2026-02-29 1582-10-10
 2026-01-31T12:00:00Z 2026-01-31T12:00:00 2026-01-31T12:00:00.1 2026-01-31T12:00:00.123456 2026-01-31T12:00:00.1234567Z
 2026-01-31T12:00 2026-01-31T12:00Z 2026-01-31T12 2026-01-31T12:00:00.25Z
 2026-01-31T12:00:00+01:00 2026-01-31T12:00:00+1 2026-01-31T12:00:00+1:00 2026-01-31T12:00:00+01:0
 2026-01-31T12:00:00+0100 2026-01-31T12:00:00-18:01 2026-01-31T12:00:00Europe/Berlin 2026-01-31T12:00:00GMT+01:00
 2026-01-31T12:00:00PST 2026-01-31T12:00:00Nope/Zone 2026-03-29T02:30:00 2026-10-25T02:30:00 2026-07-01T12:00:00.5
 1800-01-01T00:00:00 2500-07-01T12:00:00 10000-07-01T00:00:00 2026-01-31T24:00:00 2026-01-31T23:59:60 2026-1-3T4:5:6
 2026GMT-01-31T12:00:00 294247-01-10T04:00:54.775808Z T - é😀""")
DATES = _words("2026-01-31 2026-1-3 2024-02-29 1582-10-10 2026-01-31T")
TIMES = _words("""2026-01-31T12:00:00Z 2026-01-31T12:00:00 2026-01-31T12:00:00.123456 2026-01-31T12:00:00+01:00 2026-01-31
 2026-01-31T12:00:00.5Z 2026-01-31T12:00:00.123456+05:30
 2026-07-01T12:00:00.5 2026-03-29T02:30:00 2026-10-25T02:30:00""")
OTHERS = [
    "true", "false", "null", '""', '" 1"', '"2026-01-31 12:00:00"', '" 2026-01-31 12:00:00 Europe/Berlin "',
    "NaN", "-INF", "{}", "[]",
    '[1,"x",null,2.5]', '{"a":1}', '{"a":"x"}', '{"b":{"c":[1,{"a":"y"}]}}', "'single'", "{'a':1}", '"\\u0041\\n\\u001f/\\/"',
    '{"x":"\\u001f\\n\\"\\\\/é😀","y":1.10,"z":1e3,"w":[true,null]}', '"\\ud800"', '{"a":1,"a":2}', '{"a":1,"a":"x"}',
    "[[1],[2]]",
]  # fmt: skip
WHOLE = [
    "", "  ", "null", "5", "[]", '[{"f0":1}]', "{}", '{"f0":1} more', '{"f0":1}{"f0":2}',
    '{"f0":1,}', '{"f0":tru}', '{"f0" : 1 ', "{f0:1}",
    '{"f0":1,"f0":null}', '{"f0":1,"f0":"x"}', '{"f0":"x","f0":1}', '{"\\u0066\\u0030":1}', '{"g":{"f0":},"f1":2}', '\n {"f0":1}',
    "{'f0':1}", '{"g":"\x01","f0":1}', None,
]  # fmt: skip

BASE64 = [
    '""',
    '"1"',
    '" 1"',
    '"YQ"',
    '"YWJ"',
    '"YQ=="',
    '"YQ==1"',
    '"YWJj 1"',
    '"YWJjY"',
    '"YWJj="',
    '"a-b"',
    '"\\u0031"',
    '"1\\n"',
]


# How Spark says that it refuses a record. Its message also names the field of a text that is no number, but an element of an
# array has no name: Spark fails in making that message.
REFUSAL = re.compile(
    r"(^|\n: org\.apache\.spark\.Spark\w+: )\[MALFORMED_RECORD_IN_PARSING\."
    r"|java\.lang\.NullPointerException\b.*(\n\tat .*)*\.cannotParseStringAsDataTypeError\("
)


def a_type(random: random.Random, depth: int = 2) -> str:
    """A type of Spark, as its text."""
    choice = random.random()
    if depth and choice < 0.2:
        return f"array<{a_type(random, depth - 1)}>"
    if depth and choice < 0.4:
        return f"struct<{','.join(f'{name}:{a_type(random, depth - 1)}' for name in 'ab'[: random.randint(1, 2)])}>"
    return random.choice(LEAVES)


def a_value(random: random.Random, kind: Any) -> str:
    """JSON that fits a type of Arrow, mostly."""
    if random.random() < 0.06:
        return random.choice([*NUMBERS, *OTHERS, *(json.dumps(text) for text in TEXTS)])
    if random.random() < 0.06:
        return "null"
    if pa.types.is_struct(kind):
        return "{" + ", ".join(f'"{field.name}": {a_value(random, field.type)}' for field in kind if random.random() < 0.9) + "}"
    if pa.types.is_list(kind):
        return f"[{','.join(a_value(random, kind.value_type) for _ in range(random.randint(0, 3)))}]"
    if pa.types.is_boolean(kind):
        return random.choice(["true", "false"])
    if pa.types.is_integer(kind):
        return str(random.randint(-100, 100))
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return random.choice([str(random.randint(-9, 9)), f"{random.randint(-99, 99) / 4}"])
    texts = {pa.types.is_date: DATES, pa.types.is_timestamp: TIMES, pa.types.is_binary: ["YQ==", "YWJj"]}
    return json.dumps(random.choice(next((some for check, some in texts.items() if check(kind)), TEXTS)))


def documents(random: random.Random, schema: pa.Schema, number: int) -> list[str | None]:
    """Payloads for a schema: many that fit, some with a field that does not, some that are none."""
    made = [
        "{" + ", ".join(f'"{field.name}": {a_value(random, field.type)}' for field in schema if random.random() < 0.9) + "}"
        for field in range(number)
    ]
    return [*made, *WHOLE]


def as_bytes(payloads: Sequence[str | None]) -> pa.Array:
    """As a stream of bytes has them, which may be anything."""
    return pa.array([None if payload is None else payload.encode() for payload in payloads], pa.binary())


def as_numbers(kind: pa.DataType) -> pa.DataType:
    """A type with numbers for dates and times, of which Python does not have all."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(as_numbers(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(as_numbers(kind.value_type)))
    return pa.int64() if pa.types.is_timestamp(kind) else pa.int32() if pa.types.is_date(kind) else kind


def plain(column: pa.Array, kind: pa.DataType) -> list[str]:
    return [repr(value) for value in column.cast(kind).cast(as_numbers(kind)).to_pylist()]


@pytest.mark.parametrize("zone", ["Europe/Berlin", pytest.param("America/New_York", marks=pytest.mark.soak)])
def test_a_typed_read_is_what_from_json_gives(spark: SparkSession, zone: str) -> None:
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    seed = secrets.randbits(32)
    print("seed", seed)
    chance = random.Random(seed)
    # Every simple type alone and beside others; then types made of them.
    texts = [f"f0 {leaf}, f1 {chance.choice(LEAVES)}" for leaf in LEAVES]
    texts += [", ".join(f"f{place} {a_type(chance)}" for place in range(chance.randint(1, 4))) for _ in range(10)]
    texts += ["f0 struct<a:timestamp,b:array<date>>, f1 array<struct<a:timestamp_ntz,b:date>>, f2 array<timestamp>"]
    # What is no base64 can take the rest of the document with it.
    texts += ["f0 struct<a:struct<a:decimal(3,1)>,b:binary>, f1 array<array<float>>", "f0 binary, f1 int, f2 array<binary>"]
    asked: list[tuple[StructType, pa.Schema]] = []
    rows: list[tuple[int, int, str | None]] = []
    for number, text in enumerate(texts):
        struct = StructType.fromDDL(f"{text}, {CORRUPT} string")
        schema = to_arrow_schema(struct, timezone="UTC")
        asked.append((struct, schema))
        fields = pa.schema([field for field in schema if field.name != CORRUPT])
        some = (
            [f'{{"f0": {value}}}' for value in (*NUMBERS, *OTHERS, *(json.dumps(text) for text in TEXTS))] if number < 16 else []
        )
        if "binary" in text:
            some = [*some, *(f'{{"f1": 1, "f0": {one}, "f2": [{two}]}}' for one in BASE64 for two in BASE64)]
            some = [*some, *(f'{{"f1": [[1.5]], "f0": {{"b": {one}, "a": {{"a": 1}}}}, "f2": 1}}' for one in BASE64)]
        rows += [(number, place, one) for place, one in enumerate([*documents(chance, fields, 40), *some])]
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        frame = spark.createDataFrame(rows, "number int, place int, payload string").coalesce(2)
        # One job for all of them: each row is read by the schema that it is for.
        columns = [
            F.when(F.col("number") == n, F.from_json("payload", struct)).alias(f"s{n}") for n, (struct, _) in enumerate(asked)
        ]
        found = frame.select("number", "place", *columns).toArrow().sort_by([("number", "ascending"), ("place", "ascending")])
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))
    for number, (_, schema) in enumerate(asked):
        mine = [payload for one, _, payload in rows if one == number]
        theirs = found.filter(pa.compute.equal(found["number"], number)).column(f"s{number}").combine_chunks()
        whole = fields_of(as_bytes(mine), schema, False, times.zone(zone))
        for field in schema:
            expected, got = (plain(one, field.type) for one in (theirs.field(field.name), whole[field.name]))
            wrong = [(mine[at], *pair) for at, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]
            assert wrong == [], f"{texts[number]}: (payload, from_json, ours) of {field.name}: {wrong[:5]}"
        check_blocks(mine, schema, whole, zone)


def test_failfast_refuses_what_from_json_refuses(spark: SparkSession) -> None:
    """Of each mode the same: rows that both read have the same values; a record that one refuses, the other refuses too."""
    seed = secrets.randbits(32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(12):
        compare_refusals(spark, chance, 4)


def compare_refusals(spark: SparkSession, chance: random.Random, refusals: int) -> None:
    """Compare the read of payloads of a random schema with `from_json`, and so many of the refused ones."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    zone = times.zone(str(spark.conf.get("spark.sql.session.timeZone")))
    text = ", ".join(f"f{place} {a_type(chance)}" for place in range(chance.randint(1, 3)))
    struct = StructType.fromDDL(text)
    schema = to_arrow_schema(struct, timezone="UTC")
    payloads = documents(chance, schema, 60)
    fits = []
    for payload in payloads:
        try:
            fields_of(as_bytes([payload]), schema, True, zone)
        except InvalidInput:
            continue
        fits.append(payload)
    # In one block, and all in one job: an error of any of them would be one of the job. From Arrow, since rows of Python would
    # pass through a Python process, which can fail in its own ways under load.
    table = pa.table({"place": pa.array(range(len(fits)), pa.int32()), "payload": pa.array(fits, pa.string())})
    found = F.from_json("payload", struct, {"mode": "FAILFAST"}).alias("found")
    read = spark.createDataFrame(table).coalesce(1).select("place", found).toArrow()
    together, wanted = fields_of(as_bytes(fits), schema, True, zone), read.sort_by("place").column("found").combine_chunks()
    for field in schema:
        assert plain(together[field.name], field.type) == plain(wanted.field(field.name), field.type), text
    refused = [payload for payload in payloads if payload not in fits]
    for payload in chance.sample(refused, min(refusals, len(refused))):
        assert from_json_refuses(spark, text, payload), f"{text}: from_json takes {payload!r}"
        # Beside rows that fit too.
        with pytest.raises(InvalidInput, match="bad record"):
            fields_of(as_bytes([*fits[:3], payload, *fits[3:6]]), schema, True, zone)


def from_json_refuses(spark: SparkSession, types: str, payload: str | None) -> bool:
    """Whether `from_json` refuses a payload with `FAILFAST`. Raises every other error of Spark.

    Spark evaluates an expression of constants while it plans: no task has to fail, and no process has to start.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    try:
        spark.range(1).select(F.from_json(F.lit(payload), types, {"mode": "FAILFAST"})).collect()
    except (PySparkException, Py4JJavaError) as error:
        if REFUSAL.search(str(error)) is None:
            raise
        return True
    return False


@pytest.mark.parametrize(
    ("types", "payload"),
    [
        # Spark's message names the field of a text that is no number. The element of an array has no name, which Spark overlooks.
        ("f0 array<double>", '{"f0": ["x"]}'),
        ("f0 int, f1 struct<a:array<float>>", '{"f0": 1, "f1": {"a": [1.5, "a"]}}'),
        ("f0 double", '{"f0": "x"}'),
        ("f0 array<int>", '{"f0": ["x"]}'),
        ("f0 int", "[]"),
    ],
)
def test_each_way_in_which_from_json_refuses_is_known(spark: SparkSession, types: str, payload: str) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    assert from_json_refuses(spark, types, payload)
    with pytest.raises(InvalidInput, match="bad record"):
        fields_of(as_bytes([payload]), to_arrow_schema(StructType.fromDDL(types), timezone="UTC"), True, UTC)


def test_drop_malformed_is_refused_as_from_json_refuses_it(spark: SparkSession, url: str, ask: Ask) -> None:
    ask("select penstock.create_stream('a', 1)")
    ask("select penstock.append('a', '{\"f0\": \"x\"}')")
    with pytest.raises(Exception, match="DROPMALFORMED|PARSE_MODE_UNSUPPORTED"):
        spark.sql("select from_json('{\"f0\": \"x\"}', 'f0 int', map('mode', 'DROPMALFORMED'))").collect()
    reader = spark.read.format("penstock").options(url=url, subscribe="a", mode="DROPMALFORMED")
    with pytest.raises(Exception, match="DROPMALFORMED"):
        reader.schema("f0 int").load().collect()


def check_blocks(payloads: Sequence[str | None], schema: pa.Schema, whole: dict[str, pa.Array], zone: str) -> None:
    """What a row gives depends on no other row of its block; and a bad record is an error with FAILFAST."""
    fits = [at for at, raw in enumerate(whole[CORRUPT].to_pylist()) if raw is None]
    values = as_bytes(payloads)
    good = fields_of(values.take(pa.array(fits, pa.int64())), schema, True, times.zone(zone))
    for field in schema:
        assert plain(good[field.name], field.type) == plain(whole[field.name].take(pa.array(fits, pa.int64())), field.type)
    for at in range(len(payloads)):
        alone = quick_fields(values.slice(at, 1), schema)
        if alone is not None:
            for field in schema:
                assert plain(alone[field.name], field.type) == plain(whole[field.name].slice(at, 1), field.type), payloads[at]
        if at not in fits:
            with pytest.raises(InvalidInput, match="bad record"):
                fields_of(values.slice(at, 1), schema, True, times.zone(zone))


@pytest.mark.no_jvm
def test_one_bad_row_takes_nothing_from_the_others() -> None:
    price = pa.decimal128(20, 2)
    schema = pa.schema([("n", pa.int64()), ("price", price), ("o", pa.struct([("at", pa.timestamp("us", tz="UTC"))]))])
    payloads = [f'{{"n": {n}, "price": {n}.25, "o": {{"at": "2026-01-31T12:00:00Z"}}}}' for n in range(1000)]
    payloads[500] = payloads[500].replace('"n": 500', '"n": "x"')
    found = fields_of(pa.array(payloads), schema, False, UTC)
    assert [found[name].null_count for name in schema.names] == [1, 0, 0]
    assert found["price"][500].as_py() == Decimal("500.25")
    with pytest.raises(InvalidInput, match="the field n is not int64"):
        fields_of(pa.array(payloads), schema, True, UTC)


@pytest.mark.no_jvm
def test_dates_and_times_inside_structs_and_arrays_are_read_in_the_zone() -> None:
    at, day, local = pa.timestamp("us", tz="UTC"), pa.date32(), pa.timestamp("us")
    schema = pa.schema([
        ("o", pa.struct([("at", at), ("day", day), ("local", local)])), ("days", pa.list_(day)),
        ("more", pa.list_(pa.struct([("at", at)]))), ("n", pa.int64()),
    ])  # fmt: skip
    payload = (
        '{"o": {"at": "2026-07-01T12:00:00", "day": "2026-07-01", "local": "2026-07-01T12:00:00"}, "days": ["2026-07-01", null],'
        ' "more": [{"at": "2026-01-31T12:00:00"}, {"at": "2026-01-31T12:00:00Z"}], "n": %s}'
    )
    wanted = {
        "o": {"at": datetime(2026, 7, 1, 10, tzinfo=UTC), "day": date(2026, 7, 1), "local": datetime(2026, 7, 1, 12)},
        "days": [date(2026, 7, 1), None],
        "more": [{"at": datetime(2026, 1, 31, hour, tzinfo=UTC)} for hour in (11, 12)],
    }
    # Beside a record that is not whole, too.
    for numbers in (["1", "2"], ["1", '"x"']):
        found = fields_of(pa.array([payload % number for number in numbers]), schema, False, times.zone("Europe/Berlin"))
        assert {name: found[name].to_pylist() for name in wanted} == {name: [one, one] for name, one in wanted.items()}
    # Of a struct, what fits stays.
    found = fields_of(pa.array([payload.replace("2026-07-01T12", "noon", 1) % 1]), schema, False, times.zone("Europe/Berlin"))
    assert found["o"].to_pylist() == [wanted["o"] | {"at": None}]


@pytest.mark.no_jvm
def test_bytes_that_are_no_document_or_two_do_not_shift_the_rows() -> None:
    # A line with null alone ends the process inside of Arrow's parser.
    assert fields_of(pa.array(["null", None]), pa.schema([("n", pa.int64())]), False, UTC)["n"].to_pylist() == [None, None]
    values = pa.array([b'{"n": 1} {"n": 2}', b"", b'{"n": 3}', b'{"n":', b'4} {"n": 5}', b"\xff"])
    found = fields_of(values, pa.schema([("n", pa.int64())]), False, UTC)
    assert found["n"].to_pylist() == [1, None, 3, None, None, None]


@pytest.mark.no_jvm
def test_the_quick_way_is_taken_for_what_it_can_do() -> None:
    kinds = {
        "n": pa.int64(), "x": pa.float64(), "s": pa.string(), "b": pa.bool_(), "at": pa.timestamp("us", tz="UTC"),
        "day": pa.date32(), "o": pa.struct([("n", pa.int32()), ("l", pa.list_(pa.string()))]),
    }  # fmt: skip
    document = (
        '{"n": 1, "x": 2.5, "s": "t", "b": true, "at": "2026-01-31T12:00:00+01:00", "day": "2026-01-31", "o": {"n": 1, "l": []}}'
    )
    found = quick_fields(pa.array([document, None]), pa.schema(list(kinds.items())))
    assert found is not None
    slow = FromJson(pa.schema(list(kinds.items())), True, UTC).columns([document, None])
    assert {name: column.to_pylist() for name, column in found.items()} == {
        name: column.to_pylist() for name, column in slow.items()
    }
    for kind in (pa.decimal128(10, 2), pa.list_(pa.date32()), pa.float32(), pa.binary(), pa.timestamp("us")):
        assert quick_fields(pa.array(["{}"]), pa.schema([("f", kind)])) is None


@pytest.mark.no_jvm
@pytest.mark.parametrize("kind", [pa.timestamp("us", tz="UTC"), pa.date32()], ids=str)
def test_a_time_has_one_value_in_both_ways_whatever_its_form(kind: pa.DataType) -> None:
    """Each form alone in its block: the quick way gives what the slow one gives, or leaves it to that."""
    days = _words("2026-01-31 2024-02-29 2026-02-29 1582-10-10 1800-01-01 2999-12-31 0999-12-31 10000-01-01 2026-1-3")
    clocks = ["", " 12:00:00", *_words("T T12 T12:00 T12:00:00 t12:00:00 T00:00:00 T23:59:59 T24:00:00 T23:59:60 T1:2:3")]
    fractions = ["", *_words(". .5 .25 .123 .1234 .123456 .000001 .1234567 ,5")]
    zones = ["", " Z", *_words("Z z +00:00 -00:00 +01:00 -05:30 +17:59 +18:00 -18:01 +19:00 +01 +0100 +1:00 UTC")]
    texts = [f"{day}{clock}{zone}" for day in days for clock in clocks for zone in zones]
    texts += [
        f"2026-07-01{clock}{fraction}{zone}" for clock in ("T12:00:00", " 23:59:59") for fraction in fractions for zone in zones
    ]
    schema, quick = pa.schema([("at", kind)]), 0
    slow = FromJson(schema, False, times.zone("Europe/Berlin"))
    for text in texts:
        payloads = pa.array([json.dumps({"at": text})])
        if (found := quick_fields(payloads, schema)) is not None:
            quick += 1
            expected = slow.columns(payloads.to_pylist())
            assert plain(found["at"], kind) == plain(expected["at"], kind), text
    usual = ["2026-01-31"] if pa.types.is_date(kind) else [
        "2026-01-31T12:00:00Z", "2026-01-31 12:00:00Z", "2026-07-01T12:00:00.5Z", "2026-01-31T12:00:00.123456-05:30",
    ]  # fmt: skip
    assert quick_fields(pa.array([json.dumps({"at": text}) for text in usual]), schema) is not None
    assert quick >= len(usual)


@pytest.mark.no_jvm
def test_times_of_the_usual_form_are_read_with_their_fraction_and_their_zone() -> None:
    at, day = pa.timestamp("us", tz="UTC"), pa.date32()
    found = quick_fields(
        pa.array([
            '{"at": "2026-01-31T12:00:00.123456Z", "day": "2026-01-31"}',
            '{"at": "2026-01-31 00:30:00.5+01:00", "day": "1999-12-31"}',
            '{"at": "2026-01-31T23:59:59-05:30", "day": null}',
        ]),
        pa.schema([("at", at), ("day", day)]),
    )  # fmt: skip
    assert found is not None, "the quick way left it"
    assert found["at"].to_pylist() == [
        datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC),
        datetime(2026, 1, 30, 23, 30, 0, 500000, tzinfo=UTC),
        datetime(2026, 2, 1, 5, 29, 59, tzinfo=UTC),
    ]
    assert found["day"].to_pylist() == [date(2026, 1, 31), date(1999, 12, 31), None]


@pytest.mark.no_jvm
def test_single_quotes_and_infinite_numbers_are_read_as_by_spark() -> None:
    assert decoded("""{'a': 'it "is"\\n', "b": [1, -INF, 'x', {}, []], 'c': null, 'd': 1.5e3} more""", None) == {
        "a": 'it "is"\n', "b": [1, "-inf", "x", {}, []], "c": None, "d": "1.5e3",
    }  # fmt: skip
    for text in ("{'a': }", "{'a' 1}", "['a' 1]", "{'a", "['", "[" * 100_000, "{'a':" * 100_000, "['\x01']"):
        with pytest.raises(ValueError, match=".*"):
            decoded(text, None)


@pytest.mark.no_jvm
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (1.0, "1.0"), (0.001, "0.001"), (0.00099, "9.9E-4"), (1234567.125, "1234567.125"),
        (1e7, "1.0E7"), (9999999.0, "9999999.0"), (-1.5e300, "-1.5E300"), (100.0, "100.0"),
    ],
)  # fmt: skip
def test_numbers_in_text_are_as_java_writes_them(value: float, text: str) -> None:
    assert java_double(value) == text
