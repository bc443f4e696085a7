"""What the source says of the public names: signatures, docstrings, and what they say of each parameter."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias, cast

import griffe

from penstock.public import DEFINED_IN

SOURCES = Path(__file__).parents[2] / "src"
Described: TypeAlias = griffe.Class | griffe.Function | griffe.Attribute
_RECORDS = {"NamedTuple", "TypedDict", "StrEnum", "enum.StrEnum", "JobOptions", "KeyedJobOptions"}
_KINDS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, or a field of a record.

    Attributes:
        name: Its name.
        type: Its annotation.
        default: Its default, or None.
        text: What the docstring says of it; empty: nothing.
    """

    name: str
    type: str
    default: str | None
    text: str


@dataclass(frozen=True)
class Documented:
    """A public name or a member of one.

    Attributes:
        name: Name, with that of its class.
        kind: "class", "function", "property" or "attribute".
        signature: How it is called, or its type.
        text: Its docstring without sections.
        parameters: Its parameters or fields.
        returns: What it returns, as the docstring says.
        raises: Errors, and when each is raised.
        members: Public methods and properties of a class.
    """

    name: str
    kind: str
    signature: str
    text: str
    parameters: tuple[Parameter, ...] = ()
    returns: str = ""
    raises: tuple[tuple[str, str], ...] = ()
    members: tuple[Documented, ...] = field(default=())

    def everything(self) -> Iterator[Documented]:
        """Itself, then its members."""
        yield self
        yield from self.members


def documented() -> Iterator[Documented]:
    """The public names, in the order of the table."""
    for name in DEFINED_IN:
        yield _of_class(name, found) if isinstance(found := _found(name), griffe.Class) else _of_member(name, found)


@cache
def _package() -> griffe.Module:
    # griffe warns that the list of names is no literal.
    logging.getLogger("griffe").setLevel(logging.ERROR)
    loaded = griffe.load("penstock", search_paths=[SOURCES], docstring_parser="google", resolve_aliases=True)
    return cast(griffe.Module, loaded)


def _found(name: str) -> Described:
    return _final(_package()[f"{DEFINED_IN[name].removeprefix('penstock.')}.{name}"])


def _final(found: griffe.Object | griffe.Alias) -> Described:
    return cast(Described, found.final_target if found.is_alias else found)  # type: ignore[union-attr]


def _of_class(name: str, of: griffe.Class) -> Documented:
    described = _descriptions(of)
    members = []
    for member, found in sorted(_members(of).items(), key=lambda item: _final(item[1]).path != f"{of.path}.{item[0]}"):
        target = _final(found)
        if member.startswith("_") or not target.docstring or not target.path.startswith("penstock."):
            continue
        if isinstance(target, griffe.Function) or "property" in target.labels or member not in described:
            members.append(_of_member(f"{name}.{member}", target, of))
    called = [each for each in of.parameters if each.name != "self"]
    if _is_record(of):
        parameters = [
            Parameter(
                field,
                _plain(found.annotation),
                _text(found.value),
                described.get(field) or _described(found) or _said_of(of, field),
            )
            for field, found in _fields(of).items()
        ]
    else:
        of_call = [_parameter(each, of, None) for each in called]
        # A class whose docstring does not describe its arguments is made by Penstock alone.
        made = any(section.kind is griffe.DocstringSectionKind.parameters for section in _sections(of))
        parameters = of_call if made else []
        parameters += [
            Parameter(field, _plain(of.members[field].annotation) if field in of.members else "", None, text)  # type: ignore[union-attr]
            for field, text in described.items()
            if field not in {each.name for each in parameters}
        ]
    return Documented(
        name, "class", "", _prose(of), tuple(parameters), _section(of, "returns"), _raises(of), tuple(members)
    )  # fmt: skip


def _of_member(name: str, of: Described, owner: griffe.Class | None = None) -> Documented:
    if isinstance(of, griffe.Attribute):
        return Documented(name, "property", str(of.annotation or ""), _prose(of), (), _section(of, "returns"), _raises(of))
    assert isinstance(of, griffe.Function)
    parameters = tuple(_parameter(each, of, owner) for each in of.parameters if each.name not in ("self", "cls"))
    asynchronous = "async " if "async" in of.labels else ""
    shown = [_shown(each) for each in of.parameters if each.name not in ("self", "cls")]
    keyword = next((i for i, each in enumerate(_called(of)) if each.kind is griffe.ParameterKind.keyword_only), None)
    if keyword is not None and not any(each.kind is griffe.ParameterKind.var_positional for each in of.parameters):
        shown.insert(keyword, "*")
    returns = f" -> {of.returns}" if of.returns is not None else ""
    return Documented(
        name, "function", f"{asynchronous}{name}({', '.join(shown)}){returns}", _prose(of), parameters, _section(of, "returns"),
        _raises(of),
    )  # fmt: skip


def _plain(annotation: object) -> str:
    """An annotation without what is only for pydantic."""
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        inner = annotation.slice
        return str(inner.elements[0] if isinstance(inner, griffe.ExprTuple) else inner)
    return str(annotation or "")


def _described(of: griffe.Attribute) -> str:
    """What pydantic says of a field."""
    found = re.search(r"Field\(.*description=(['\"])(.*?)\1", str(of.annotation))
    return found[2] if found else ""


def _called(of: griffe.Function) -> list[griffe.Parameter]:
    return [each for each in of.parameters if each.name not in ("self", "cls")]


def _shown(parameter: griffe.Parameter) -> str:
    star = _KINDS.get(parameter.kind, "") if parameter.kind else ""
    type = f": {parameter.annotation}" if parameter.annotation is not None else ""
    default = f" = {parameter.default}" if parameter.default is not None and not star else ""
    return f"{star}{parameter.name}{type}{default}"


def _parameter(parameter: griffe.Parameter, of: Described, owner: griffe.Class | None) -> Parameter:
    text = _descriptions(of).get(parameter.name) or _said_of(of, parameter.name, owner)
    star = bool(parameter.kind and parameter.kind in _KINDS)
    return Parameter(parameter.name, _plain(parameter.annotation), None if star else _text(parameter.default), text)


def _said_of(of: Described, parameter: str, owner: griffe.Class | None = None) -> str:
    """Where else a parameter is described: in a docstring to which this one refers."""
    for reference in re.findall(r"`([\w.]+)`", of.docstring.value if of.docstring else ""):
        for target in _referred(reference, of, owner):
            if parameter in _descriptions(target):
                return f"See `{reference}`."
    return ""


def _referred(reference: str, of: Described, owner: griffe.Class | None) -> Iterator[Described]:
    first, _, rest = reference.partition(".")
    if first in DEFINED_IN:
        found = _found(first)
        if not rest:
            yield found
        elif isinstance(found, griffe.Class) and rest in _members(found):
            yield _final(_members(found)[rest])
    for scope in (owner, of.parent):
        if isinstance(scope, griffe.Class) and reference in _members(scope):
            yield _final(_members(scope)[reference])


def _members(of: griffe.Class) -> dict[str, griffe.Object | griffe.Alias]:
    return of.all_members


def _is_record(of: griffe.Class) -> bool:
    return "dataclass" in of.labels or any(str(base) in _RECORDS for base in of.bases)


def _fields(of: griffe.Class) -> dict[str, griffe.Attribute]:
    found = {name: _final(each) for name, each in _members(of).items() if not name.startswith("_")}
    return {
        name: each
        for name, each in found.items()
        if isinstance(each, griffe.Attribute)
        and "property" not in each.labels
        and "ClassVar" not in str(each.annotation)
        and "repr=False" not in str(each.value)
    }


def _descriptions(of: Described) -> dict[str, str]:
    """What a docstring says of parameters and attributes."""
    found: dict[str, str] = {}
    for base in of.resolved_bases if isinstance(of, griffe.Class) else ():
        found |= _descriptions(_final(base)) if _final(base).path.startswith("penstock.") else {}
    for section in _sections(of):
        if section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
            for each in section.value:
                found[each.name.lstrip("*")] = _flowing(each.description)
    return found


def _raises(of: Described) -> tuple[tuple[str, str], ...]:
    found = [s for s in _sections(of) if s.kind is griffe.DocstringSectionKind.raises]
    return tuple((str(each.annotation).strip("()"), _flowing(each.description)) for section in found for each in section.value)


def _section(of: Described, kind: str) -> str:
    found = [section for section in _sections(of) if section.kind.value == kind]
    return " ".join(_flowing(each.description) for section in found for each in section.value)


def _prose(of: Described) -> str:
    texts = [str(s.value) for s in _sections(of) if s.kind is griffe.DocstringSectionKind.text]
    return "\n\n".join(texts).strip()


def _sections(of: Described) -> list[griffe.DocstringSection]:
    # A section of returned values holds sentences, which are no names of values.
    return of.docstring.parse("google", returns_named_value=False, returns_multiple_items=False) if of.docstring else []


def _flowing(text: str) -> str:
    return " ".join(text.split())


def _text(value: object) -> str | None:
    return None if value is None else str(value)
