"""Checks a configuration against its schema (schema.py) before anything heavy is imported or started.

Every mistake ends in a `UserError` of one line that names the key, what it may be, and what was given.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Union, cast

from pydantic import BaseModel, ConfigDict, Strict, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from experiments.config import kinds
from experiments.config.kinds import shown
from experiments.config.schema import Config, Section
from experiments.config.schema_cluster import CLUSTERS, Cluster
from experiments.config.schema_optimizer import OPTIMIZERS, Optimizer
from launch.errors import UserError

PLACES = ("data.path", "cluster.hosts")
"""Where data and hosts are: the scale and the number of nodes may depend on them."""
FIRST = (
    "cluster.nodes",
    "cluster.ranks_per_node",
    "train.lr_batch",
    "train.batch_per_rank",
    "train.accumulate",
)
"""The shape of the world and the batch: other keys are computed from these, so these are checked first."""
GROUPS = ("workload", "optimizer", "cluster", "scale", "wandb")
"""Sections that a file is chosen for."""
OF_CLASSES = ("workload", "optimizer", "cluster")
"""Sections that name a class."""
_ABSENT = object()
SECTIONS: dict[str, tuple[dict[str, type[Any]], type[Section]]] = {
    "optimizer": (OPTIMIZERS, Optimizer),
    "cluster": (CLUSTERS, Cluster),
}
"""Sections whose keys depend on their class: the schemas by class, and what all of them have."""


def check_some(keys: Sequence[str], get: Callable[[str], Any], raw: dict[str, Any]) -> None:
    """Raises UserError for a key that is out of range; a key that this configuration has not is left out.

    get: the resolved value of a key. raw: the configuration, which need not be resolved.
    """
    every = {key: field for prefix, model, _ in _parts(raw) for key, field in fields(model, prefix)}
    for key in keys:
        if (field := every.get(key)) is not None and value_at(raw, key, _ABSENT) is not _ABSENT:
            value, kind = get(key), cast(Any, typing.Annotated[field.annotation, field])  # type: ignore[valid-type]
            try:
                TypeAdapter(kind).validate_python(value)
            except ValidationError as error:
                raise _wrong(key, field, error.errors(include_url=False), value) from error


def check(config: dict[str, Any], *, structure_only: bool = False) -> None:
    """Raises UserError for the first mistake in a configuration.

    structure_only: an unknown or a missing key, or a value in the place of a section: references (${...}) need not be
    resolved.
    """
    for prefix, model, values in _parts(config):
        check_section(model, values, prefix, keys_of(config), structure_only)


def check_section(
    model: type[BaseModel], values: Any, prefix: str = "", known: Sequence[str] = (), structure_only: bool = False
) -> None:
    """Raises UserError for the first mistake in `values`, which stand under the key `prefix`.

    known: the keys there are, for suggestions; empty: those of the schema. structure_only: as in `check`.
    """
    try:
        model.model_validate(values)
        return
    except ValidationError as refused:
        order = {"extra_forbidden": 0, "invalid_key": 0, "missing": 1}  # names first, then values
        errors: list[Any] = sorted(refused.errors(include_url=False), key=lambda e: order.get(e["type"], 2))
    for error in errors:
        key, field = _at(model, error["loc"])
        if error["type"] in ("extra_forbidden", "invalid_key"):
            raise unknown(_join(prefix, *error["loc"]), known or list(dict(fields(model, prefix))))
        is_section = field is not None and section_of(field.annotation) is not None
        is_value = is_section and not str(error["input"]).startswith("${")  # which may refer to a section
        if error["type"] == "missing" or is_value or not structure_only:
            same = [e for e in errors if _at(model, e["loc"])[0] == key]
            raise _error(prefix, key, field, error, values, same)


def keys_of(config: dict[str, Any]) -> list[str]:
    """The keys that a configuration may have, sections included, for suggestions."""
    found = list(GROUPS)
    for prefix, model, _ in _parts(config):
        found += dict(fields(model, prefix))
    workload = config.get("workload")
    return found + [f"workload.{key}" for key in (workload if isinstance(workload, dict) else ())]


def unknown(key: str, known: Sequence[str]) -> UserError:
    """What to say of a key that does not exist, with the nearest names: of its section, else of all."""
    known = list(dict.fromkeys(known))
    section, _, last = key.rpartition(".")
    siblings = [k for k in known if k.rpartition(".")[0] == section]
    names = difflib.get_close_matches(last, [k.rpartition(".")[2] for k in siblings], n=2, cutoff=0.6)
    near = [_join(section, name) for name in names]
    around = [k for k in known if not key.startswith(f"{k}.")]
    near = near or difflib.get_close_matches(key, around, n=2, cutoff=0.6)
    near = near or [k for k in known if k.rpartition(".")[2] == last][:3]  # the right name in the wrong section
    near = near or (siblings[:8] if section else [])
    hint = f"did you mean {' or '.join(near)}?" if near else "docs/configuration.md lists all keys"
    return UserError(f"no key {shown(str(key))} in the configuration; {hint}")


def arguments(cls: type, section: dict[str, Any], prefix: str) -> None:
    """Raises UserError unless `section` suits the constructor of `cls`: names and types as it declares them."""
    check_section(signature(cls), {key: value for key, value in section.items() if key != "_target_"}, prefix)


def _parts(config: dict[str, Any]) -> Iterator[tuple[str, type[BaseModel], Any]]:
    """The whole, then the sections whose schema depends on their class: (prefix, schema, values)."""
    yield "", Config, config
    for name in OF_CLASSES:
        section = config.get(name)
        if not isinstance(section, dict):
            continue
        target = section.get("_target_")
        if not isinstance(target, str) or not target:
            raise UserError(f"{name}._target_ must be the full name of a class, not {shown(target)}")
        if name in SECTIONS:
            model = SECTIONS[name][0].get(target) or _open(name)
            yield name, model, {key: value for key, value in section.items() if key != "_target_"}


@functools.cache
def _open(name: str) -> type[BaseModel]:
    """The schema of a class that has none: what all have, and the usual names where they mean the same everywhere."""
    schemas, common = SECTIONS[name]
    usual: dict[str, FieldInfo] = {}
    twofold: set[str] = set()
    for model in schemas.values():
        for key, field in model.model_fields.items():
            if key in usual and (usual[key].annotation, usual[key].metadata) != (field.annotation, field.metadata):
                twofold.add(key)
            usual.setdefault(key, field)
    fields: dict[str, Any] = {
        key: (typing.Annotated[field.annotation, *field.metadata, field], None)
        for key, field in usual.items()
        if key not in twofold and key not in common.model_fields
    }
    return create_model(
        f"Any{name}", __base__=type("Open", (common,), {"model_config": ConfigDict(extra="allow")}), **fields
    )


@functools.cache
def signature(cls: type) -> type[BaseModel]:
    """The arguments of a constructor as a schema; those of the classes above it where it passes them on."""
    fields: dict[str, Any] = {}
    open_ended = False
    for level in cls.__mro__:
        if "__init__" not in vars(level) or level is object:
            continue
        constructor = vars(level)["__init__"]
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        try:
            hints = typing.get_type_hints(constructor)
        except NameError:  # a name that is only imported for type checkers
            hints = {}
        for p in parameters:
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
                needed = p.default is p.empty and not open_ended  # a class above may be given what the user is not
                fields.setdefault(p.name, (_as_in_yaml(hints.get(p.name, Any)), ... if needed else p.default))
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not open_ended:
            break
    config = ConfigDict(extra="allow" if open_ended else "forbid", strict=True, allow_inf_nan=False,
                        arbitrary_types_allowed=True, protected_namespaces=())  # fmt: skip
    return create_model(cls.__name__, __config__=config, **fields)


def _as_in_yaml(hint: Any) -> Any:
    """The type of an argument, whose tuples may be lists: YAML has no others."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(_as_in_yaml(part) for part in typing.get_args(hint))]  # noqa: UP007
    return Annotated[hint, Strict(False)] if typing.get_origin(hint) is tuple else hint


def _error(
    prefix: str, path: tuple[str, ...], field: FieldInfo | None, error: Any, values: Any, same: Sequence[Any]
) -> UserError:
    key = _join(prefix, *path)
    if error["type"] == "missing":
        if key in GROUPS:
            return UserError(f"{key} is missing: choose one with {key}=NAME")
        return UserError(f"{key} is missing: it cannot be left out or removed")
    value = values
    for part in path:
        value = value.get(part) if isinstance(value, dict) else value
    free = list(path)
    while isinstance(value, dict) and len(free) < len(error["loc"]) and error["loc"][len(free)] in value:
        free.append(error["loc"][len(free)])  # a key of the user's own, in a section with free keys
        value = value[free[-1]]
    if len(free) > len(path) and field is not None and section_of(field.annotation) is dict:
        kind = "keys with values" if error["type"] == "dict_type" else "a finite number, text, true, false or null"
        return UserError(f"{shown(_join(prefix, *free))[1:-1]} must be {kind}, not {shown(value)}")
    if field is None:
        return UserError(f"{key or 'the configuration'} must hold keys with values, not {shown(value)}")
    return _wrong(key, field, same, value)


def _wrong(key: str, field: FieldInfo, errors: Sequence[Any], value: Any) -> UserError:
    """What to say of a value that its kind refuses."""
    if (section := section_of(field.annotation)) is not None:
        first = next(iter(getattr(section, "model_fields", {})), "KEY")
        return UserError(f"{key} is a section: set its keys, such as {key}.{first}=VALUE, not {shown(value)}")
    for error in errors:
        most = error.get("ctx", {}).get("le", 0)
        if error["type"] == "less_than_equal" and most >= kinds.LIMIT:
            return UserError(f"{key} must be at most {most:.15g}, not {shown(value)}")
    words = kinds.words(field.annotation, field.metadata)
    return UserError(f"{key} {words.verb} {words.text}, not {shown(value)}")


def _at(model: Any, where: Sequence[Any]) -> tuple[tuple[str, ...], FieldInfo | None]:
    """The key that the place of an error lies in, and its field."""
    path: list[str] = []
    field = None
    for part in where:
        inner = getattr(model, "model_fields", {}).get(part)
        if inner is None:
            break
        path.append(str(part))
        field, model = inner, section_of(inner.annotation)
    return tuple(path), field


def section_of(annotation: Any) -> Any:
    """The schema of a key that is a section (dict for one with free keys), else None."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return next((s for s in map(section_of, typing.get_args(annotation)) if s is not None), None)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return dict if typing.get_origin(annotation) is dict else None


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The dotted keys of a schema, sections included, and their fields. prefix: the key that it stands under."""
    for name, field in model.model_fields.items():
        key = _join(prefix, name)
        yield key, field
        if (section := section_of(field.annotation)) not in (None, dict):
            yield from fields(section, key)


def value_at(config: dict[str, Any], key: str, otherwise: Any = None) -> Any:
    """The value of a dotted key of a configuration; `otherwise` where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, otherwise) if isinstance(value, dict) else otherwise
    return value


def _join(*parts: Any) -> str:
    return ".".join(str(part) for part in parts if part != "")
