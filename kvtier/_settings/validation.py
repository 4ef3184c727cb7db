"""Turns a raw mapping into a settings model, or into one error that says what to change.

pydantic's own messages show the input, secrets included, and name Python types instead of settings. These
messages name each field, its value unless it could be a secret, and the remedy.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from kvtier._settings.quantities import SIZE_NEEDED
from kvtier.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)
Loc = tuple[int | str, ...]

_EXPLAINED = "explained"
_IN_WORDS = {  # for errors whose pydantic text is about its types, not settings
    "byte_size": SIZE_NEEDED,
    "byte_size_unit": SIZE_NEEDED,
    "path_type": "a path is needed, as text",
    "tuple_type": "a list is needed",
    "finite_number": "a finite number is needed",
}
_HIDDEN = "**********"
_SHORTEST_HIDDEN = 4
_LOGIN_IN_URL = re.compile(r"(?<=://)[^\s'\"]*@")
_QUERY_IN_URL = re.compile(r"(://[^\s'\"?]*\?)[^\s'\"]+")


def build(
    model: type[ModelT],
    raw: Mapping[str, object],
    where: str = "",
    places: Mapping[str, str] = MappingProxyType({}),
) -> ModelT:
    """Validate ``raw`` with ``model``. ConfigError names every wrong field.

    ``where`` is the path of ``raw`` in the whole configuration, such as ``secondary_tiers[1]``. ``places``
    says where settings belong that are not the model's.
    """
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        secrets = list(_secrets(model, raw))
        problems = [
            _problem(detail, model, where, secrets, places) for detail in error.errors(include_url=False)
        ]
        message = _without_logins("; ".join(dict.fromkeys(problems)))
    # Outside of the handler: chained, pydantic's error would be printed with the secrets it shows.
    raise ConfigError(message)


def explained(problems: Iterable[str]) -> PydanticCustomError:
    """Return an error for a validator to raise whose problems are complete messages."""
    return PydanticCustomError(_EXPLAINED, "{problems}", {"problems": "; ".join(problems)})


def hide(text: str, settings: BaseModel) -> str:
    """Return a backend's or client's text without secrets: those of ``settings``, and those in URLs.

    Some repeat their input: a server without AUTH names its arguments, including the password.
    """
    return _without_logins(conceal(text, _held(settings)))


def conceal(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` with every secret of at least 4 characters replaced by asterisks.

    Shorter secrets occur in ordinary words; replacing them there would reveal them.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST_HIDDEN:
            text = text.replace(secret, _HIDDEN)
    return text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean x?"`` for the known word nearest to ``word``, or nothing."""
    by_lower = {name.lower(): name for name in sorted(known)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def nesting(paths: Iterable[tuple[str, str]]) -> str:
    """Return a sentence on two of ``paths`` that are equal or nested; "" if there are none.

    Each is an absolute path and its name in the sentence.
    """
    for (one, its_name), (other, others_name) in itertools.combinations(paths, 2):
        if os.path.commonpath((one, other)) in (one, other):
            return f"{its_name} and {others_name} are one directory, or one inside the other"
    return ""


def _without_logins(text: str) -> str:
    return _QUERY_IN_URL.sub(rf"\1{_HIDDEN}", _LOGIN_IN_URL.sub(f"{_HIDDEN}@", text))


def _leaves(value: object) -> Iterator[object]:
    """Yield every value in a model, a mapping or a list, however deeply nested."""
    if isinstance(value, BaseModel):
        value = {**vars(value), **(value.model_extra or {})}
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _held(settings: BaseModel) -> Iterator[str]:
    for leaf in _leaves(settings):
        if isinstance(leaf, SecretStr | SecretBytes):
            secret = leaf.get_secret_value()
            yield secret.decode(errors="replace") if isinstance(secret, bytes) else secret


def _problem(
    detail: ErrorDetails, model: type[BaseModel], where: str, secrets: list[str], places: Mapping[str, str]
) -> str:
    loc = detail["loc"]
    path = _path(where, loc)
    if detail["type"] == _EXPLAINED:
        return detail["msg"]
    if detail["type"] == "extra_forbidden":
        # The value is omitted: its setting is unknown, and could be a misspelled secret.
        if (place := places.get(str(loc[-1]))) is not None:
            return f"{path} is in the wrong place: move it {place}"
        names = _fields(_owner(model, loc))
        hint = did_you_mean(str(loc[-1]), names) or f"; the settings are: {', '.join(sorted(names))}"
        return f"{path} is not a setting{hint}"
    field = _field(model, loc)
    if detail["type"] == "missing":
        return f"{path} is missing{_remedy(field)}"
    return f"{path}{_shown(detail['input'], field)}: {_reason(detail, secrets)}{_remedy(field)}"


def _path(where: str, loc: Loc) -> str:
    text = where
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the configuration"


def _reason(detail: ErrorDetails, secrets: list[str]) -> str:
    text = _IN_WORDS.get(detail["type"], detail["msg"])
    text = text.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = conceal(text, secrets)  # The validator's author may have put the value into the message.
    return text[:1].lower() + text[1:]


def _remedy(field: FieldInfo | None) -> str:
    return f" ({field.description.rstrip('.')})" if field is not None and field.description else ""


def _shown(value: object, field: FieldInfo | None) -> str:
    """Return the value if it is known to be a plain one."""
    if field is None or _is_secret(field) or _inner_model(field.annotation) is not None:
        return ""
    return f" = {value!r}" if isinstance(value, str | int | float | None) else ""


def _is_secret(field: FieldInfo) -> bool:
    return "Secret" in repr(field.annotation)


def _inner_model(annotation: object) -> type[BaseModel] | None:
    """Return the model that a field holds, directly or in a list, a mapping or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_inner_model, get_args(annotation))), None)


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _owner(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """Return the model that the last part of ``loc`` is, or should be, a field of."""
    for part in loc[:-1]:
        field = _fields(model).get(str(part))
        inner = _inner_model(field.annotation) if field is not None else None
        model = inner or model
    return model


def _field(model: type[BaseModel], loc: Loc) -> FieldInfo | None:
    names = [part for part in loc if isinstance(part, str)]
    return _fields(_owner(model, loc)).get(names[-1]) if names else None


def _secrets(model: type[BaseModel], raw: object) -> Iterator[str]:
    """Yield every text in ``raw`` that belongs to a field with a secret."""
    if not isinstance(raw, Mapping):
        return
    for name, field in _fields(model).items():
        inner = _inner_model(field.annotation)
        if _is_secret(field):
            yield from (str(leaf) for leaf in _leaves(raw.get(name)) if leaf is not None)
        elif inner is not None:
            for item in _items(raw.get(name)):
                yield from _secrets(inner, item)


def _items(value: object) -> list[object]:
    """Return candidates for a model's raw mapping: the value itself, or its items."""
    if isinstance(value, Mapping):
        return [value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []
