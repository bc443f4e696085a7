"""Fields of JSON payloads with the values that Spark's `from_json` gives, row by row. Needs no JVM.

A task in Python cannot call Spark, so this module follows `JacksonParser` of Spark 4 type by type. A field that does not fit
its type is null, and the others are not affected. In a struct, and in structs in an array, the fields that fit stay; any other
array with an element that does not fit is null. All fields of a text that is no JSON object are null. All of these payloads are
bad records, which are errors with `FAILFAST`. A property test compares this module with Spark. `penstock.spark.streams.rows`
first tries the quick way.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import tzinfo
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_UP, Context, Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import InvalidInput
from penstock.spark.json import times
from penstock.spark.json.loose_json import Number, Repeated, decoded

if TYPE_CHECKING:
    import pyarrow as pa

CORRUPT = "_corrupt_record"
"""A column of this name has the payloads that are bad records, as with Spark's readers of JSON."""
Convert: TypeAlias = Callable[[Any], Any]

_INFINITE = {
    "NaN": math.nan, "+INF": math.inf, "+Infinity": math.inf, "Infinity": math.inf, "-INF": -math.inf, "-Infinity": -math.inf,
}  # fmt: skip
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_EXACT = Context(prec=2000, rounding=ROUND_HALF_UP, Emax=MAX_EMAX, Emin=MIN_EMIN)
_QUAD = r"[\x00-\x20]*((?:[A-Za-z0-9+/]{4})|[A-Za-z0-9+/]{3}=|[A-Za-z0-9+/]{2}==)"
_QUADS = re.compile(rf"(?:{_QUAD})*[\x00-\x20]*")
_ONE_LEFT = re.compile(rf"(?:{_QUAD})*[\x00-\x20]*[A-Za-z0-9+/]")
_ESCAPED = re.compile(r'[\x00-\x1f"\\\U00010000-\U0010ffff]')
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class _Bad(Exception):
    """A value does not fit its type."""


class _Partly(_Bad):
    """A part of a value does not fit its type.

    Attributes:
        value: The value, with null for that part.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class _Lost(Exception):
    """After this value, Spark's parser finds no more fields."""


class FromJson:
    """Takes the fields of a schema from payloads.

    Args:
        schema: The fields; one named `_corrupt_record`, which is text, has the payloads that are bad records.
        fail_fast: Whether a bad record is an error.
        zone: Zone of times that name none.
    """

    def __init__(self, schema: pa.Schema, fail_fast: bool, zone: tzinfo) -> None:
        self._schema = schema
        self._fail_fast = fail_fast
        self._converters: dict[str, Convert] = {
            field.name: converter(field.type, zone) for field in schema if field.name != CORRUPT
        }

    def columns(self, payloads: Iterable[str | bytes | None]) -> dict[str, pa.Array]:
        """The columns of the fields of payloads. Raises `InvalidInput` for a bad record, with `fail_fast`."""
        import pyarrow as pa

        found: dict[str, list[Any]] = {field.name: [] for field in self._schema}
        appends = [(name, convert, found[name].append) for name, convert in self._converters.items()]
        corrupt = found.get(CORRUPT)
        for payload in payloads:
            document = _EMPTY if payload is None else self._document(payload)
            bad: str | None = None
            if type(document) is not dict and type(document) is not Repeated:
                bad = None if document is _EMPTY else "it is no JSON object"
                for _, _, append in appends:
                    append(None)
            else:
                try:
                    values = [_field(document, name, convert) for name, convert, _ in appends]
                except _Lost:
                    values = [(None, False)] * len(appends)
                for (name, _, append), (value, fits) in zip(appends, values, strict=True):
                    append(value)
                    if not fits:
                        bad = f"the field {name} is not {self._schema.field(name).type}"
            if bad is not None and self._fail_fast:
                raise InvalidInput(f"a payload is a bad record: {bad}", hint="Change the schema, or set mode to PERMISSIVE.")
            if corrupt is not None:
                corrupt.append(None if bad is None else _raw(payload))
        return {field.name: pa.array(found[field.name], field.type) for field in self._schema}

    @staticmethod
    def _document(payload: str | bytes) -> Any:
        try:
            return decoded(payload, _EMPTY)
        except ValueError:
            return None


_EMPTY = object()


def _field(document: Any, name: str, convert: Convert) -> tuple[Any, bool]:
    """The value of a field of an object, and whether it fits."""
    if type(document) is dict:
        value = document.get(name)
        if value is None:
            return None, True
        try:
            return convert(value), True
        except _Partly as partly:
            return partly.value, False
        except _Bad:
            return None, False
    # When a name occurs more than once, the last value that fits counts.
    found, fits = None, True
    for one, value in document:
        if one == name:
            try:
                found = None if value is None else convert(value)
            except _Partly as partly:
                found, fits = partly.value, False
            except _Bad:
                fits = False
    return found, fits


def converter(kind: pa.DataType, zone: tzinfo) -> Convert:
    """The function that converts a value of JSON (not null) to an Arrow type. It raises `_Bad` for one that does not fit."""
    import pyarrow as pa

    types = pa.types
    if types.is_struct(kind):
        return _struct([(field.name, converter(field.type, zone)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        return _array(converter(kind.value_type, zone))
    if types.is_decimal(kind):
        return _decimal(kind.precision, kind.scale)
    if types.is_timestamp(kind):
        return _time(lambda text: times.legacy_micros(text, zone), numbers=True) if kind.tz else _time(times.local_micros)
    if types.is_date(kind):
        return _time(times.legacy_days)
    if types.is_integer(kind):
        return _integer(kind.bit_width)
    simple: list[tuple[Callable[[Any], bool], Convert]] = [
        (types.is_boolean, _boolean),
        (types.is_float32, _float),
        (types.is_float64, _double),
        (types.is_string, text_of),
        (types.is_large_string, text_of),
        (types.is_binary, _binary),
        (types.is_large_binary, _binary),
    ]
    for check, convert in simple:
        if check(kind):
            return convert
    raise InvalidInput(f"a field of a payload cannot be {kind}", hint="Use from_json on the column value.")


def _struct(fields: Sequence[tuple[str, Convert]]) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not dict and type(value) is not Repeated:
            raise _Bad
        found, whole = {}, True
        for name, one in fields:
            found[name], fits = _field(value, name, one)
            whole = whole and fits
        if not whole:
            raise _Partly(found)
        return found

    return convert


def _array(element: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list:
            raise _Bad
        found, whole = [], True
        for one in value:
            try:
                found.append(None if one is None else element(one))
            except _Partly as partly:
                found.append(partly.value)
                whole = False
        if not whole:
            raise _Partly(found)
        return found

    return convert


def _boolean(value: Any) -> Any:
    if type(value) is not bool:
        raise _Bad
    return value


def _integer(bits: int) -> Convert:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    # Jackson also accepts unsigned bytes.
    most = 255 if bits == 8 else high

    def convert(value: Any) -> Any:
        if type(value) is not int or not low <= value <= most:
            raise _Bad
        return value if value <= high else value - 256

    return convert


def _double(value: Any) -> Any:
    kind = type(value)
    if kind is Number:
        return float(value)
    if kind is int:
        try:
            return float(value)
        except OverflowError:
            return math.copysign(math.inf, value)
    if kind is str and value in _INFINITE:
        return _INFINITE[value]
    raise _Bad


def _float(value: Any) -> Any:
    import numpy as np

    exact = _double(value)
    if not math.isfinite(exact) or exact == 0:
        return exact
    with np.errstate(over="ignore"):
        rounded = np.float32(exact)
        # A number close to the middle of two floats, which is rounded twice, may end at the wrong one.
        for other in (np.nextafter(rounded, np.float32(math.inf)), np.nextafter(rounded, np.float32(-math.inf))):
            if math.isfinite(float(rounded)) and math.isfinite(float(other)) and (float(rounded) + float(other)) / 2 == exact:
                real, middle = Fraction(value), Fraction(exact)
                if real != middle and (real > middle) == (other > rounded):
                    return float(other)
    return float(rounded)


def _decimal(precision: int, scale: int) -> Convert:
    unit = Decimal((0, (1,), -scale))

    def convert(value: Any) -> Any:
        kind = type(value)
        if kind is str:
            value = value.replace(",", "")
        if kind not in (int, str, Number) or (kind is not int and _DECIMAL.fullmatch(value) is None):
            raise _Bad
        try:
            found = Decimal(value).quantize(unit, context=_EXACT)
        except InvalidOperation:
            raise _Bad from None
        if len(found.as_tuple().digits) > precision:
            raise _Bad
        return found

    return convert


def _time(read: Callable[[str], int], numbers: bool = False) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is str and value:
            try:
                return read(value)
            except ValueError:
                raise _Bad from None
        if numbers and type(value) is int and -(1 << 63) <= value < 1 << 63:
            # The number is in seconds, and the product overflows as in Java.
            return (value * 1_000_000 + (1 << 63)) % (1 << 64) - (1 << 63)
        raise _Bad

    return convert


def _binary(value: Any) -> Any:
    # Blanks may stand before each group of four, and each group may end with padding.
    if type(value) is not str:
        raise _Bad
    if _QUADS.fullmatch(value) is None:
        # Jackson reads the quotation mark behind a single character as part of the text, and so misses its end.
        raise _Lost if _ONE_LEFT.fullmatch(value) else _Bad
    return b"".join(base64.b64decode(quad) for quad in re.findall(_QUAD, value))


def text_of(value: Any) -> str:
    """The text of a string, and any other value as compact JSON, with numbers as Java writes them."""
    if type(value) is str:
        return value.encode("utf-8", "replace").decode() if _surrogates(value) else value
    return _as_json(value)


def _as_json(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return f'"{_ESCAPED.sub(_escape, text_of(value))}"'
    if kind is Number:
        return java_double(float(value))
    if kind is int:
        return str(value)
    if kind is list:
        return f"[{','.join(map(_as_json, value))}]"
    if kind is dict or kind is Repeated:
        pairs = value.items() if kind is dict else value
        return f"{{{','.join(f'{_as_json(name)}:{_as_json(one)}' for name, one in pairs)}}}"
    return {None: "null", True: "true", False: "false"}[value]


def java_double(value: float) -> str:
    """A number as `Double.toString` of Java 19 and later writes it. Earlier versions write some numbers with one more digit."""
    if not math.isfinite(value):
        return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # noqa: S101
    minus, text = "-" * sign, "".join(map(str, digits))
    if value == 0:
        return f"{'-' * (math.copysign(1, value) < 0)}0.0"
    point = len(text) + exponent
    if -3 < point <= 7:
        if point <= 0:
            return f"{minus}0.{'0' * -point}{text}"
        return f"{minus}{text[:point].ljust(point, '0')}.{text[point:] or '0'}"
    return f"{minus}{text[0]}.{text[1:] or '0'}E{point - 1}"


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    if (short := _SHORT_ESCAPES.get(char)) is not None:
        return short
    raw = char.encode("utf-16-be").hex().upper()
    return "".join(f"\\u{raw[at : at + 4]}" for at in range(0, len(raw), 4))


def _surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def _raw(payload: str | bytes | None) -> str | None:
    return payload.decode("utf-8", "replace") if isinstance(payload, bytes) else payload
