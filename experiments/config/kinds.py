"""The kinds of values that configuration keys take, and the words for them in messages and in docs/configuration.md.

Upper limits of `LIMIT` and more are technical (a number that would overflow or never end); words leave them out, and a value
beyond one gets the limit as a message.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Field, Strict
from pydantic.fields import FieldInfo

from launch.words import escaped

LIMIT = 1000
"""Upper bounds from here on are technical."""
LONGEST = 60
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class Words:
    """What a value of a kind is called where its type does not say it: "{key} {verb} {text}"."""

    text: str
    verb: str = "must be"


def doc(text: str, default: Any = ...) -> Any:
    """A key of a schema: what it means, and the value of a key that may be left out."""
    return Field(default, description=text)


def _rule(holds: bool, value: Any) -> Any:
    if not holds:
        raise ValueError
    return value


def _path(value: str) -> str:
    return _rule(bool(value.strip()) and value.isprintable() and len(value) <= 4096, value)


Switch = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), AfterValidator(_path), Words("text on one line, in quotes where it is a number")]
Name = Annotated[
    str,
    Strict(),
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"),
    Words("letters, digits, '.', '_', '-', at most 100 of them, in quotes where they are a number", "names a folder:"),
]
Folder = Annotated[str, Strict(), AfterValidator(_path), Words("the path of a folder")]
Location = Annotated[str, Strict(), AfterValidator(_path), Words("the path of a file or a folder")]

Scalar = Switch | Annotated[int, Strict()] | Annotated[float, Field(strict=True, allow_inf_nan=False)] | str | None
Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Nodes = Annotated[int, Field(strict=True, ge=1, le=10_000)]
Ranks = Annotated[int, Field(strict=True, ge=1, le=1_000)]
Seed = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
Restarts = Annotated[int, Field(strict=True, ge=0, le=LIMIT)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]

Positive = Annotated[float, Field(strict=True, gt=0, le=1e6, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=1e7, allow_inf_nan=False)]
Megabytes = Annotated[float, Field(strict=True, gt=0, le=1e5, allow_inf_nan=False)]
Decay = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=2**-15, le=1, allow_inf_nan=False), Words("a number from 2^-15 to 1")]
AtMostOne = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
AtLeastOne = Annotated[float, Field(strict=True, ge=1, le=1e6, allow_inf_nan=False)]
_Between = Annotated[float, Field(strict=True, gt=0, lt=1, allow_inf_nan=False)]

Dilation = Annotated[Literal["auto"] | AtLeastOne, Words("auto, or a number of 1 or more")]
Steps = Annotated[Count | _Between, Words("a number of steps, 1 or more, or a fraction of all steps between 0 and 1")]
Warmup = Annotated[Count | Decay, Words("a fraction of all steps from 0 up to 1, or a number of steps")]
Every = Annotated[Count | Decay, Words("a number of steps, or a fraction of all steps")]
Betas = Annotated[
    list[Decay],
    Field(min_length=2, max_length=2),
    Words("two numbers from 0 up to, but not including, 1, such as [0.9,0.999]"),
]
Bounds = Annotated[
    list[NotNegative],
    Field(min_length=2, max_length=2),
    AfterValidator(lambda pair: _rule(pair[0] <= pair[1] and pair[1] > 0, pair)),
    Words("two rising numbers of 0 or more, such as [0.0,10.0]"),
]
Epochs = Annotated[
    list[Positive],
    AfterValidator(lambda some: _rule(some == sorted(set(some)), some)),
    Words("a rising list of epochs, such as [30,60,90]"),
]
Hosts = Annotated[Text | list[Text], Words("hosts a,b,c, or a file with one host per line")]
Options = Annotated[Text | list[Text], Words("a list of arguments, such as [-i,KEYFILE]")]
Rates = Annotated[list[Positive], Field(min_length=1), Words("a list of learning rates, such as [0.01,0.1]")]
Variants = Annotated[
    list[list[Text]], Words("a list of lists of overrides, such as [['optimizer=sgdm'],['optimizer=birder']]")
]


def words(annotation: Any, metadata: typing.Sequence[Any] = ()) -> Words:
    """What a value of a kind is called."""
    for item in metadata:
        if isinstance(item, Words):
            return item
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        kind, *more = typing.get_args(annotation)
        return words(kind, more)
    if origin in (Union, types.UnionType):
        parts = typing.get_args(annotation)
        inner = [words(part, metadata) for part in parts if part is not type(None)]
        text = ", or ".join([w.text for w in inner] + ["null"] * (type(None) in parts))
        return Words(text, inner[0].verb)
    if origin is Literal:
        return Words("one of " + ", ".join(map(str, typing.get_args(annotation))))
    if annotation is bool:
        return Words("one of true, false")
    if annotation is int:
        return Words("a whole number" + _range(metadata, whole=True))
    if annotation is float:
        return Words("a number" + _range(metadata, whole=False))
    named = {str: "text", list: "a list", tuple: "a list", dict: "a mapping"}
    return Words(named.get(origin or annotation, "a value of another kind"))


def shown(value: Any) -> str:
    """`value` as the user would type it, on one line, escaped and shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**LONGEST:
        return f"a number of {round(math.log10(2) * value.bit_length())} digits"
    text = str(value).encode("unicode_escape").decode("ascii") if isinstance(value, str) else escaped(str(value))
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 20]}...{text[-17:]}"
    return f"'{text}'" if isinstance(value, str) else text


def _bounds(metadata: typing.Sequence[Any]) -> dict[str, Any]:
    every = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    names = ("ge", "gt", "le", "lt")
    return {n: bound for part in every for n in names if (bound := getattr(part, n, None)) is not None}


def _range(metadata: typing.Sequence[Any], *, whole: bool) -> str:
    b = _bounds(metadata)
    least = b.get("ge", b.get("gt"))
    most = b.get("le", b.get("lt"))
    if least is None:
        return ""
    if most is None or most >= LIMIT:
        return f", {least} or more" if whole else f" above {least}" if "gt" in b else f" of {least} or more"
    if "lt" in b:
        return f" from {least} up to, but not including, {most}"
    return f" above {least}, at most {most}" if "gt" in b else f" from {least} to {most}"
