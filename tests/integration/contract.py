"""What an adapter relies on in the engine's interface, read from the adapter's source and held against it.

``misses`` answers with one sentence for each name, parameter, field or member that has moved, and for each
hook of a base class that the adapter neither defines nor leaves out on purpose. Types are followed from
annotations, as far as those reach: ``config.cache.blocks_per_chunk`` is known to be a field of the class
that the field ``cache`` is annotated with. What no annotation tells is listed by hand (``Terms.also``).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

Version = tuple[int, int]


@dataclass(frozen=True)
class Terms:
    """What the source of an adapter cannot tell.

    Attributes:
        since: methods and parameters that are defined for later versions of the engine, by the first one.
        also: dotted names, with the needed parameters in parentheses for what is called by name.
        hooks: base classes each of whose methods is to be known: defined, or left on purpose.
        complete: records each of whose fields is to be known: used, or left on purpose.
        left: methods and fields of those, with the reason for leaving them.
        own: methods that the adapter adds to classes derived from those.
    """

    since: Mapping[str, Version] = field(default_factory=dict)
    also: Sequence[str] = ()
    hooks: Sequence[str] = ()
    complete: Sequence[str] = ()
    left: Mapping[str, str] = field(default_factory=dict)
    own: Sequence[str] = ()


def misses(adapter: Iterable[str], package: str, version: Version, terms: Terms) -> list[str]:
    """Say what has moved, one sentence each, sorted.

    Args:
        adapter: names of the modules that import the engine.
        package: the engine's top-level package.
        version: the engine's.
        terms: what the source does not tell.
    """
    contract = Contract(package, version, terms)
    sources = {name: _source(name) for name in adapter}
    for source in sources.values():
        contract.check_imports(source)
    if not contract.found:  # else the adapter cannot be imported
        for name, source in sources.items():
            contract.read(importlib.import_module(name), source)
        contract.check_fields()
        contract.check_terms()
    return sorted(set(contract.found))


def _source(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Instance:
    """An expression's value is an instance of a class, or of a generic alias such as ``tuple[X, ...]``."""

    hint: Any


@dataclass(frozen=True)
class Thing:
    """An expression's value is this very object: a module, a class, a function."""

    it: Any


@dataclass(frozen=True)
class Method:
    """An expression's value is a method bound to an instance."""

    owner: type
    function: Any


Value = Instance | Thing | Method | None


class Contract:
    """Collects what an adapter uses of the engine, and what of it is not there.

    Attributes:
        found: what is not as the adapter takes it to be, in sentences.
        used: dotted names of all that it uses.
    """

    def __init__(self, package: str, version: Version, terms: Terms) -> None:
        self._package = package
        self._version = version
        self._terms = terms
        self.found: list[str] = []
        self.used: set[str] = set()

    # --- reading ---------------------------------------------------------------------------------

    def read(self, module: ModuleType, source: ast.Module) -> None:
        """Read a module of the adapter."""
        _Reader(self, vars(module)).visit(source)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                self._check_class(value)

    def check_imports(self, tree: ast.Module) -> None:
        """Check the names that are imported; those in a ``try`` may be gone."""
        optional = {id(node) for part in ast.walk(tree) if isinstance(part, ast.Try) for node in part.body}
        for node in ast.walk(tree):
            if id(node) in optional:
                continue
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if self.is_ours(alias.name):
                        self.need(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module and self.is_ours(node.module):
                for alias in node.names:
                    self.need(f"{node.module}.{alias.name}")

    def is_ours(self, name: object) -> bool:
        """Whether a dotted name is in the engine's package."""
        return isinstance(name, str) and (name == self._package or name.startswith(f"{self._package}."))

    def need(self, dotted: str) -> Any:
        """Note that a name is used; return what it names, or None."""
        self.used.add(dotted)
        try:
            return _find(dotted)
        except LookupError as error:
            self.found.append(f"{dotted}: {error.args[0]}")
            return None

    # --- classes that are derived ----------------------------------------------------------------

    def _check_class(self, cls: type) -> None:
        for base in cls.__mro__[1:]:
            if self.is_ours(base.__module__) and not issubclass(base, Exception):
                self._check_overrides(cls, base)

    def _check_overrides(self, cls: type, base: type) -> None:
        where = _name(base)
        mine, theirs = _members(cls), _members(base)
        for name in theirs.keys() & mine.keys():
            self._compare(f"{where}.{name}", _signature(theirs[name]), _signature(mine[name]))
        for name in getattr(cls, "__abstractmethods__", frozenset()) & vars(base).keys():
            self.found.append(f"{where}.{name}: is abstract, and {cls.__name__} does not define it")
        if where in self._terms.hooks:
            for name in theirs.keys() - mine.keys() - {"__init__"}:
                if not self._is_left(f"{where}.{name}"):
                    self.found.append(f"{where}.{name}: is neither defined nor left on purpose")
            for name in mine.keys() - _all_attributes(base):
                if not self._comes_later(f"{where}.{name}") and name not in self._terms.own:
                    self.found.append(f"{where}.{name}: is gone")

    def _compare(self, where: str, theirs: inspect.Signature | None, mine: inspect.Signature | None) -> None:
        """Say where a call that fits the base class's method does not fit the derived one's."""
        if theirs is None or mine is None:
            return
        self.used.add(where)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in mine.parameters.values())
        for name, parameter in theirs.parameters.items():
            if name not in mine.parameters and not takes_any:
                self.found.append(f"{where}: parameter {name} is new, and not taken")
            elif name in mine.parameters and _needs_more(mine.parameters[name], parameter):
                self.found.append(f"{where}: parameter {name} can be left out or be positional, and here not")
        for name in mine.parameters:
            known = name in theirs.parameters or mine.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            if not known and not self._comes_later(f"{where}.{name}"):
                self.found.append(f"{where}: parameter {name} is gone")
        order = [name for name in theirs.parameters if name in mine.parameters]
        if order != [name for name in mine.parameters if name in theirs.parameters]:
            self.found.append(f"{where}: the parameters have another order, {', '.join(order[1:])}")

    def _comes_later(self, name: str) -> bool:
        since = self._terms.since.get(name)
        return since is not None and self._version < since

    def _is_left(self, name: str) -> bool:
        return name in self._terms.left

    # --- what expressions use --------------------------------------------------------------------

    def attribute(self, value: Value, name: str) -> Value:
        """Note the use of an attribute, and say what its value is."""
        match value:
            case Thing(it) if isinstance(it, ModuleType) and self.is_ours(it.__name__):
                return _thing(self.need(f"{it.__name__}.{name}"))
            case Thing(it) if isinstance(it, type) and self.is_ours(it.__module__):
                member = self.need(f"{_name(it)}.{name}")
                return Method(it, member.__func__) if isinstance(member, classmethod) else _thing(member)
            case Thing(it):
                return _thing(inspect.getattr_static(it, name, None))
            case Instance(hint) if isinstance(hint, type):
                return self._attribute_of(hint, name)
        return None

    def _attribute_of(self, cls: type, name: str) -> Value:
        owners = [base for base in cls.__mro__ if name in attributes(base)]
        if not owners:
            base = next((base for base in cls.__mro__ if self.is_ours(base.__module__)), None)
            if base is not None:
                self.used.add(f"{_name(base)}.{name}")
                self.found.append(f"{_name(base)}.{name}: is gone")
            return None
        if self.is_ours(owners[0].__module__):
            self.used.add(f"{_name(next(b for b in cls.__mro__ if self.is_ours(b.__module__)))}.{name}")
        return attributes(owners[0])[name]

    def call(self, value: Value, arguments: ast.Call) -> Value:
        """Note a call, and say what it returns."""
        match value:
            case Thing(it) if isinstance(it, type):
                if self.is_ours(it.__module__):
                    self._check_call(_name(it), it, arguments, named=True)
                return Instance(it)
            case Thing(it) if isinstance(it, FunctionType):
                if self.is_ours(it.__module__):
                    self._check_call(f"{it.__module__}.{it.__qualname__}", it, arguments)
                return _result(it)
            case Method(owner, function):
                if self.is_ours(owner.__module__):
                    bound = types.MethodType(function, object())
                    self._check_call(f"{_name(owner)}.{function.__name__}", bound, arguments)
                return _result(function)
        return None

    def _check_call(self, where: str, it: Any, call: ast.Call, *, named: bool = False) -> None:
        if any(isinstance(part, ast.Starred) for part in call.args) or any(
            k.arg is None for k in call.keywords
        ):
            return
        if named and call.args and _fields(it):
            self.found.append(f"{where}: is made with arguments that are not named, so a move would not show")
        try:
            signature = inspect.signature(it)
        except ValueError:
            return
        for keyword in call.keywords:
            takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
            if keyword.arg not in signature.parameters and not takes_any:
                self.found.append(f"{where}: parameter {keyword.arg} is gone")
                return
            self.used.add(f"{where}.{keyword.arg}")
        try:
            signature.bind(*call.args, **{str(keyword.arg): None for keyword in call.keywords})
        except TypeError as error:
            self.found.append(f"{where}: cannot be called so: {error}")

    # --- what is listed --------------------------------------------------------------------------

    def check_terms(self) -> None:
        """Check what is listed by hand, and that the lists name nothing that is not there."""
        for term in self._terms.also:
            dotted, _, parameters = term.rstrip(")").partition("(")
            it = self.need(dotted)
            signature = _signature(it) if parameters and it is not None else None
            for parameter in filter(None, parameters.split(", ")):
                if signature is not None and parameter not in signature.parameters:
                    self.found.append(f"{dotted}: parameter {parameter} is gone")
        for dotted, since in self._terms.since.items():
            if self._version >= since and not _exists(dotted):
                self.found.append(f"{dotted}: is gone")

    def check_fields(self) -> None:
        """Check that every field of what the engine gives is used or left on purpose, and not both."""
        for name in self._terms.left.keys() & self.used:
            self.found.append(f"{name}: is left on purpose, and used")
        for dotted in self._terms.complete:
            cls = self.need(dotted)
            for name in _fields(cls):
                if f"{dotted}.{name}" not in self.used and not self._is_left(f"{dotted}.{name}"):
                    self.found.append(f"{dotted}.{name}: is neither used nor left on purpose")


class _Reader(ast.NodeVisitor):
    """Follows types through a module, and tells the contract what is used."""

    def __init__(self, contract: Contract, names: Mapping[str, Any], owner: type | None = None) -> None:
        self._contract = contract
        self._names = names
        self._owner = owner
        self._known: dict[str, Value] = {}

    # --- scopes ----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Read the methods with the class in mind."""
        owner = self._names.get(node.name)
        reader = _Reader(self._contract, self._names, owner if isinstance(owner, type) else None)
        for part in node.body:
            reader.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Read the body with the parameters' types."""
        reader = _Reader(self._contract, self._names, self._owner)
        reader._known = dict(self._known)
        reader._take_parameters(node)
        for part in node.body:
            reader.visit(part)

    def _take_parameters(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for number, argument in enumerate(arguments):
            if argument.annotation is not None:
                self._known[argument.arg] = _instance(_evaluate(argument.annotation, self._names))
            elif number == 0 and self._owner is not None:
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                self._known[argument.arg] = (
                    Thing(self._owner) if "classmethod" in decorators else Instance(self._owner)
                )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Take in what is imported inside of a function."""
        for alias in node.names:
            name = alias.asname or alias.name
            if name not in self._names:
                self._known[name] = _thing(_found(f"{node.module}.{alias.name}"))

    # --- statements that name something ----------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        """Give the name the value's type."""
        value = self.value_of(node.value)
        for target in node.targets:
            self._name(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Give the name the annotation's type."""
        if node.value is not None:
            self.value_of(node.value)
        self._name(node.target, _instance(_evaluate(node.annotation, self._names)))

    def visit_For(self, node: ast.For) -> None:
        """Give the name the elements' type."""
        self._name(node.target, _element(self.value_of(node.iter)))
        for part in [*node.body, *node.orelse]:
            self.visit(part)

    def _name(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._known[target.id] = value
        else:
            self.visit(target)

    def generic_visit(self, node: ast.AST) -> None:
        """Read the expressions of other statements."""
        if isinstance(node, ast.expr):
            self.value_of(node)
        else:
            super().generic_visit(node)

    # --- expressions -----------------------------------------------------------------------------

    def value_of(self, node: ast.expr) -> Value:
        """Say what the value of an expression is, and tell what it uses."""
        match node:
            case ast.Name(id):
                return self._known[id] if id in self._known else _thing(self._names.get(id))
            case ast.Attribute(value, name):
                return self._contract.attribute(self.value_of(value), name)
            case ast.Call(ast.Name("super"), []) if self._owner is not None:
                return Instance(self._owner.__mro__[1])
            case ast.Call(ast.Name("isinstance"), [ast.Name(name), kind]):
                narrowed = self.value_of(kind)
                if isinstance(narrowed, Thing) and isinstance(narrowed.it, type):
                    self._known[name] = Instance(narrowed.it)
                return None
            case ast.Call(ast.Name("getattr"), [value, ast.Constant(str(name)), *_]):
                return self._contract.attribute(self.value_of(value), name)
            case ast.Call(function, arguments, keywords):
                called = self.value_of(function)
                for part in [*arguments, *(keyword.value for keyword in keywords)]:
                    self.value_of(part)
                return self._contract.call(called, node)
            case ast.Subscript(value, index):
                self.value_of(index)
                return _element(self.value_of(value))
            case ast.IfExp(test, body, other):
                self.value_of(test)
                return self.value_of(body) or self.value_of(other)
        return self._nested(node)

    def _nested(self, node: ast.expr) -> Value:
        reader = self
        if hasattr(node, "generators"):  # its names are its own
            reader = _Reader(self._contract, self._names, self._owner)
            reader._known = dict(self._known)
        for generator in getattr(node, "generators", ()):
            reader._name(generator.target, _element(reader.value_of(generator.iter)))
        if isinstance(node, ast.NamedExpr):
            value = self.value_of(node.value)
            self._name(node.target, value)
            return value
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, ast.expr_context | ast.operator | ast.arguments):
                reader.visit(part)
        return None


# --- looking at the engine -----------------------------------------------------------------------


def _find(dotted: str) -> Any:
    """Return what a dotted name names, a field of a class as its name.

    Raises:
        LookupError: there is no such thing.
    """
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            it: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if f"{dotted}.".startswith(f"{error.name}."):
                continue
            raise
        for part in parts[end:]:
            if (isinstance(it, type) and not hasattr(it, part) and part in _all_attributes(it)) or (
                isinstance(it, FunctionType) and part in inspect.signature(it).parameters
            ):
                it = part
            elif not hasattr(it, part):
                raise LookupError("is gone")
            else:
                it = inspect.getattr_static(it, part) if isinstance(it, type) else getattr(it, part)
        return it
    raise LookupError("the module is gone")


def _found(dotted: str) -> Any:
    try:
        return _find(dotted)
    except LookupError:
        return None


def _exists(dotted: str) -> bool:
    try:
        _find(dotted)
    except LookupError:
        return False
    return True


@cache
def attributes(cls: type) -> Mapping[str, Value]:
    """Return what a class itself, without its bases, gives its instances, with the types where known."""
    known: dict[str, Value] = {}
    for name, member in vars(cls).items():
        if isinstance(member, property) or hasattr(member, "func"):  # functools.cached_property
            known[name] = _result(getattr(member, "fget", None) or getattr(member, "func", None))
        elif isinstance(member, staticmethod | classmethod):
            known[name] = Thing(member.__func__)
        elif isinstance(member, FunctionType):
            known[name] = Method(cls, member)
        else:
            known[name] = Instance(type(member))
    names = vars(sys.modules[cls.__module__])
    for name, hint in inspect.get_annotations(cls).items():
        known[name] = _instance(_evaluate(hint, names))
    for name, value in _set_on_self(cls):
        known.setdefault(name, value)
    return known


def _all_attributes(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in attributes(base)}


def _set_on_self(cls: type) -> Iterator[tuple[str, Value]]:
    """Yield what methods set on their instance."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):
        return
    names = vars(sys.modules[cls.__module__])
    for method in [node for node in getattr(tree, "body", ()) if isinstance(node, ast.FunctionDef)]:
        reader = _Reader(Contract("", (0, 0), Terms()), names)
        reader._take_parameters(method)
        for node in ast.walk(method):
            match node:
                case ast.AnnAssign(ast.Attribute(ast.Name("self"), name), annotation):
                    yield name, _instance(_evaluate(annotation, names))
                case ast.Assign([ast.Attribute(ast.Name("self"), name)], value):
                    yield name, _simple_value(reader, value)


def _simple_value(reader: _Reader, value: ast.expr) -> Value:
    match value:
        case ast.Name(name):
            return reader._known.get(name)
        case ast.Call(ast.Name()):
            called = reader.value_of(value.func)
            return Instance(called.it) if isinstance(called, Thing) and isinstance(called.it, type) else None
    return None


def _evaluate(annotation: ast.expr | Any, names: Mapping[str, Any]) -> Any:
    if isinstance(annotation, ast.expr):
        annotation = ast.unparse(annotation)
    if not isinstance(annotation, str):
        return annotation
    try:
        hint = eval(annotation, dict(names))
    except Exception:
        return None
    return _evaluate(hint, names)


def _instance(hint: Any) -> Value:
    """Return an instance of a hint, of ``X | None`` that of ``X``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        hint = options[0] if len(options) == 1 else None
    return None if hint is None else Instance(hint)


def _element(value: Value) -> Value:
    if not isinstance(value, Instance):
        return None
    arguments = typing.get_args(value.hint)
    if issubclass(typing.get_origin(value.hint) or object, Mapping):
        return None
    return _instance(arguments[0]) if arguments else None


def _thing(it: Any) -> Value:
    if isinstance(it, staticmethod | classmethod):
        it = it.__func__
    return None if it is None else Thing(it)


def _result(function: Any) -> Value:
    function = inspect.unwrap(function) if function is not None else None
    if not isinstance(function, FunctionType):
        return None
    return _instance(_evaluate(function.__annotations__.get("return"), function.__globals__))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_member(name: str, member: object) -> bool:
    callable_ = isinstance(member, FunctionType | classmethod | staticmethod | property)
    return callable_ and (name == "__init__" or not name.startswith("_"))


def _members(cls: type) -> dict[str, Any]:
    return {name: member for name, member in vars(cls).items() if _is_member(name, member)}


def _signature(member: Any) -> inspect.Signature | None:
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    return inspect.signature(member) if callable(member) else None


def _needs_more(mine: inspect.Parameter, theirs: inspect.Parameter) -> bool:
    optional = theirs.default is not theirs.empty and mine.default is mine.empty
    keyword_only = mine.kind is mine.KEYWORD_ONLY and theirs.kind is theirs.POSITIONAL_OR_KEYWORD
    return optional or keyword_only


def _fields(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        return [one.name for one in dataclasses.fields(cls) if one.init]
    return [name for name in getattr(cls, "_fields", ())]
