"""Where a setting is written: from the call that was seen, hop by hop, to the literal; which must have its value.

A literal that is not what the run has used, a value that something else reads as well, or a hop that could mean two
places raises :class:`Refusal`: no patch is better than a wrong one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.patch import declared, guards
from lightning_gpuopt.patch.expressions import (
    DEFAULTS,
    POSITIONAL,
    default_of_parameter,
    first_of_tuple,
    fits,
    imported_reads,
    is_gathered,
    member_of,
    targets_of,
)
from lightning_gpuopt.patch.reads import Reads
from lightning_gpuopt.patch.sources import (
    FUNCTIONS,
    Binding,
    Edit,
    Range,
    Refusal,
    SourceFile,
    Sources,
    last_name,
    literal_of,
    parameters,
    shortened,
)
from lightning_gpuopt.watch.code_facts import CallSite, Made, RunCode

_TRANSPARENT: Final = ("staticmethod", "classmethod", "override", "property", "no_grad", "inference_mode")
_MAX_HOPS: Final = 40


@dataclass(frozen=True)
class _At:
    """An expression, and the calls under way when it was evaluated, its own first; empty if that is not known."""

    file: SourceFile
    node: Any
    calls: tuple[CallSite, ...] = ()


class _Missing(Exception):
    """A dict has no such key."""


class _NoCall(Exception):
    """A class is made by LightningCLI."""


class Places:
    """Finds the places of one run."""

    def __init__(self, code: RunCode, sources: Sources) -> None:
        self._code, self.sources = code, sources
        self._begin("", None, None)

    def _begin(self, name: str, now: Any, value: Any) -> None:
        self._name, self._now, self._value = name, now, value
        self._is_text = False  # the literal may be a string that int() reads
        self._reads = Reads(self.sources)
        self._passed: list[CallSite] = []  # the calls through which the value has come
        self._hops = 0

    # ---- what is asked for ----

    def setting(self, made: Made, name: str, value: Any) -> Edit:
        """The edit that gives a loader or a Trainer this setting."""
        self._begin(name, made.values.get(name), value)
        file, call, calls = self.call(made)
        try:
            edit = self._argument(file, call, calls, name, POSITIONAL, DEFAULTS.get(name, (None,)))
        except (_Missing, _NoCall):
            raise Refusal(f"where {name} gets its value is not written as one literal") from None
        self._refuse_shared(made)
        guards.refuse_called_again(self.sources, edit)
        if self._hops > 1:
            guards.refuse_hidden_stores(self.sources, edit.file)
        return edit

    def added(self, made: Made, name: str, item: str) -> Edit:
        """The edit that adds an item to a list, such as a Trainer's ``callbacks``."""
        self._begin(name, None, item)
        file, call, _ = self.call(made)
        given = next((each.value for each in call.keywords if each.arg == name), None)
        if given is None and any(each.arg is None for each in call.keywords):
            raise Refusal(f"{name} may come out of the ** at {file.at(call)}")
        if given is not None and not isinstance(given, ast.List):
            raise Refusal(f"{name} is `{shortened(given)}` at {file.at(call)}, not a list that is written there")
        return Edit(file.name, Range.of(call), item, name, item=True)

    def call(self, made: Made) -> tuple[SourceFile, ast.Call, tuple[CallSite, ...]]:
        """The call that made a loader or a Trainer, which has made no other with another dataset."""
        if not made.calls:
            return self._by_its_arguments(made)
        site = made.calls[0]
        if not self._is_users(site):
            where = "generated code" if site.file.startswith("<") else f"a library, {site.file}:{site.line}"
            raise Refusal(f"the {made.name} is made in {where}, which is not yours to edit")
        file = self.sources.file(site.file)
        found = [call for call in file.calls_at(site) if self._makes(file, call, made.name)]
        if len(found) != 1:
            how = f"{len(found)} calls could have made it" if found else f"no call of {made.name} by its name is there"
            raise Refusal(f"the {made.name} is made at {file.at_line(site.line)}, where {how}")
        self._passed.append(site)
        self._refuse_several(made)
        self._refuse_explicit_self(file, found[0])
        return file, found[0], made.calls

    def _refuse_explicit_self(self, file: SourceFile, call: ast.Call, decorators: Sequence[ast.expr] = ()) -> None:
        """``Base.__init__(self, ...)``: arguments by place begin one later."""
        func = call.func
        if not isinstance(func, ast.Attribute) or any(
            last_name(each) in ("staticmethod", "classmethod") for each in decorators
        ):
            return
        by_super = isinstance(func.value, ast.Call) and last_name(func.value.func) == "super"
        by_type = isinstance(func.value, ast.Call) and last_name(func.value.func) == "type"
        if (
            by_type
            or last_name(func.value) == "__class__"
            or (func.attr == "__init__" and not by_super)
            or isinstance(self.sources.definition(file, func.value)[0], ast.ClassDef)
        ):
            raise Refusal(f"the call at {file.at(call)} gives the object itself as an argument")

    def _refuse_several(self, made: Made) -> None:
        way = self._way_of(made)
        for site in self._passed:
            made_here = [each for each in self._code.loaders if site in each.calls]
            if any(each.dataset != made.dataset or self._way_of(each) != way for each in made_here):
                place = self.sources.file(site.file).at_line(site.line)
                raise Refusal(f"the call at {place} has made other loaders as well: they would change, too")

    def _way_of(self, made: Made) -> list[CallSite]:
        """The calls in the user's files through which an object was made."""
        return [each for each in made.calls if self._is_users(each)]

    def _refuse_shared(self, made: Made) -> None:
        self._refuse_several(made)
        others = self._reads.others
        if others:
            raise Refusal(f"what sets {self._name} is read in other places, too: {', '.join(others)}; set it by hand")

    def _is_users(self, site: CallSite) -> bool:
        return site.file in self._code.files or site.file in self._code.cells

    def _makes(self, file: SourceFile, call: ast.Call, name: str) -> bool:
        func = call.func
        if last_name(func) == "__init__" or not isinstance(func, ast.Name):
            return last_name(func) in ("__init__", name)
        bound = file.bindings(func.id, call)
        return len(bound) == 1 and getattr(bound[0].node, "name", "") == name

    def _by_its_arguments(self, made: Made) -> tuple[SourceFile, ast.Call, tuple[CallSite, ...]]:
        """The only call whose class, arguments and literal values are those of an object that was made before."""
        calls = [(file, node) for file in self.sources.all for node in file.nodes if isinstance(node, ast.Call)]
        found = [each for each in calls if self._makes(*each, made.name) and fits(each[1], made.values)]
        for file in self.sources.all:
            for node in file.nodes:
                parent = file.parents.get(node)
                used = isinstance(node, (ast.Name, ast.Attribute)) and self._original_name(file, node) == made.name
                if (
                    used
                    and not (isinstance(parent, ast.Call) and parent.func is node)
                    and not isinstance(parent, (ast.ClassDef, ast.arg, *FUNCTIONS))
                ):
                    raise Refusal(f"where the {made.name} is made was not seen, and {file.at(node)} may make it")
        if len(found) == 1 and last_name(found[0][1].func) != "__init__":
            return (*found[0], ())
        several = f"several calls could be the one: {', '.join(file.at(node) for file, node in found)}"
        why = several if found else "no call has its arguments"
        raise Refusal(f"where the {made.name} is made was not seen, and {why}")

    # ---- from an expression to the literal ----

    def _resolve(self, at: _At, path: tuple[str, ...] = (), direct: Edit | None = None) -> Edit:
        """The edit of the literal that an expression has at a path of keys; ``direct`` edits the expression itself."""
        self._hops += 1
        if self._hops > _MAX_HOPS:
            raise Refusal(f"{self._name} comes through too many places")
        node, file = at.node, at.file
        if not path and (literal := literal_of(node)):
            return self._at_literal(at, literal[0], direct)
        if isinstance(node, ast.Name):
            return self._named(at, path)
        if isinstance(node, ast.Call) and not path and last_name(node.func) == "int" and len(node.args) == 1:
            self._is_text = True
            return self._resolve(replace(at, node=node.args[0]))
        if not path and (variable := declared.variable(node)) is not None:
            return self._from_environment(at, *variable)
        if (member := member_of(node)) is not None:
            return self._of_member(at, *member, path)
        if isinstance(node, ast.Dict) and path:
            pairs = list(zip(node.keys, node.values, strict=True))
            named = [(each.value if isinstance(each, ast.Constant) else None, value) for each, value in pairs]
            return self._of_pairs(at, named, path)
        if isinstance(node, ast.Call) and path:
            return self._of_call(at, node, path)
        raise Refusal(f"{self._name} is computed: `{shortened(node)}` at {file.at(node)}")

    def _at_literal(self, at: _At, literal: Any, direct: Edit | None) -> Edit:
        of_text = self._is_text and isinstance(literal, str)
        same = literal == str(self._now) if of_text else type(literal) is type(self._now) and literal == self._now
        if not same and not (literal is None and self._now in DEFAULTS.get(self._name, ())):
            raise Refusal(f"{literal!r} is written at {at.file.at(at.node)}, and the run has used {self._now!r}")
        value = repr(str(self._value)) if of_text else repr(self._value)
        return replace(direct or Edit(at.file.name, Range.of(at.node), ""), value=value)

    def _of_pairs(self, at: _At, pairs: Sequence[tuple[Any, ast.expr]], path: tuple[str, ...]) -> Edit:
        """The value at a key; a key of None is one that is not written there."""
        found = [value for key, value in pairs if key == path[0]]
        if not found and all(key is not None for key, _ in pairs):
            raise _Missing
        if len(found) != 1 or any(key is None for key, _ in pairs):
            raise Refusal(f"`{path[0]}` is not written at {at.file.at(at.node)} as one key of its own")
        return self._resolve(replace(at, node=found[0]), path[1:])

    # ---- names ----

    def _binding(self, at: _At) -> Binding:
        found = at.file.bindings(at.node.id, at.node)
        if not found:
            raise Refusal(f"`{at.node.id}` at {at.file.at(at.node)} is not assigned in that file")
        if len(found) > 1 or at.file.is_declared_global(at.node.id):
            where = ", ".join(dict.fromkeys(at.file.at(each.node) for each in found))
            raise Refusal(f"`{at.node.id}` is assigned in more than one place: {where}")
        stars = [node for node in at.file.nodes if isinstance(node, ast.alias) and node.name == "*"]
        if any(each.lineno > found[0].node.lineno for each in stars):  # type: ignore[attr-defined]
            raise Refusal(f"`{at.node.id}` may come from an `import *` in {Path(at.file.name).name}")
        return found[0]

    def _named(self, at: _At, path: tuple[str, ...]) -> Edit:
        file, bound, name = at.file, self._binding(at), at.node.id
        node = bound.node
        if isinstance(node, ast.alias):
            return self._imported(at, node, path)
        if isinstance(node, ast.ClassDef) and path:
            return self._of_class(node, file, path)
        if isinstance(node, ast.arg):
            self._reads.note(at.node, [] if path and not is_gathered(bound) else file.reads(name, bound.scope), file)
            return self._from_caller(at, bound.scope, name, path)
        if path and (changed := file.changes_of(name)):
            raise Refusal(f"`{name}` may be changed at {file.at(changed[0])}")
        value = bound.value if bound.value is not None else first_of_tuple(file, node)
        if value is None:
            raise Refusal(f"`{name}` gets its value at {file.at(node)} in a way that is not followed")
        is_constant = isinstance(bound.scope, ast.Module)
        if path:
            self._reads.note_whole(at.node, file.reads(name, bound.scope), file, path)
            for each in self.sources.all if is_constant else ():
                self._reads.note_whole(at.node, [*imported_reads(each, name), *each.member_reads(name)], each, path)
        if not path:
            self._reads.note(at.node, file.reads(name, bound.scope), file)
            if is_constant or isinstance(bound.scope, ast.ClassDef):
                self._note_importers(name)
        here = file.function_of(at.node) is file.function_of(node)
        return self._resolve(_At(file, value, at.calls if here else ()), path)

    def _note_importers(self, name: str) -> None:
        """Other files that may read or set a module's constant, by whichever name they import it."""
        for known in sorted(self.sources.known_as({name})):
            self._refuse_stored(known)
            for each in self.sources.all:
                self._reads.note(each.tree, [*imported_reads(each, known), *each.member_reads(known)], each)

    def _imported(self, at: _At, alias: ast.alias, path: tuple[str, ...]) -> Edit:
        module, name = self.sources.module_of(at.file, alias)
        if module is not None and name is None and path:
            name, path = path[0], path[1:]
        if module is None or name is None:
            raise Refusal(f"`{shortened(at.node)}` at {at.file.at(at.node)} is imported from a library")
        self._reads.followed.add(at.node)
        return self._named(_At(module, module.name_at_end(name)), path)

    # ---- arguments ----

    def _argument(
        self, file: SourceFile, call: ast.Call, calls: tuple[CallSite, ...], name: str, order: Sequence[str],
        default: tuple[Any, ...], path: tuple[str, ...] = (),
    ) -> Edit:  # fmt: skip
        """The edit for an argument of a call, by name, by place in ``order`` or out of ``**``."""
        direct = Edit(file.name, Range.of(call), "", name)
        given = next((each.value for each in call.keywords if each.arg == name), None)
        if given is not None:
            return self._resolve(_At(file, given, calls), path, direct)
        if any(isinstance(each, ast.Starred) for each in call.args):
            raise Refusal(f"the arguments at {file.at(call)} come out of a *: where {name} is, is not written there")
        if name in order and order.index(name) < len(call.args):
            index = order.index(name)
            return self._resolve(_At(file, call.args[index], calls), path, replace(direct, positional=index))
        for each in (each.value for each in call.keywords if each.arg is None):
            try:
                self._reads.unpacked = True
                if isinstance(each, ast.Name):  # what is unpacked may be changed wherever it is named
                    self._reads.note(each, file.reads(each.id), file)
                elif (
                    isinstance(each, ast.Call)
                    and not isinstance(each.func, ast.Call)
                    and last_name(each.func) != "dict"
                ):
                    for other in self.sources.all:
                        same = [
                            n
                            for n in other.nodes
                            if isinstance(n, ast.Call) and last_name(n.func) == last_name(each.func)
                        ]
                        self._reads.note(each, same, other)
                return self._resolve(_At(file, each, calls), (name, *path))
            except _Missing:
                continue
        if path or self._now not in default:
            raise Refusal(f"{name} is not given at {file.at(call)}, and the run has used {self._now!r}")
        return replace(direct, value=repr(self._value))

    def _from_caller(self, at: _At, function: Any, name: str, path: tuple[str, ...]) -> Edit:
        """The edit where a function's parameter gets its value: at the call of the function."""
        file = at.file
        decorators = () if isinstance(function, ast.Lambda) else function.decorator_list
        for decorator in decorators:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if path and last_name(called) == "main" and shortened(called).startswith("hydra."):
                raise Refusal(f"add {'.'.join(path)}={self._value} to the command line")
            if last_name(called) == "option" and declared.destination(decorator) == name and not path:
                declared.refuse_special(file, decorator)
                return self._default_of_option(file, decorator)
        odd = [
            each
            for each in decorators
            if last_name(each.func if isinstance(each, ast.Call) else each) not in _TRANSPARENT
        ]
        if isinstance(function, ast.Lambda) or [each for each in odd if not declared.is_command(each)]:
            raise Refusal(f"what calls the function at {file.at(function)} stands behind a decorator or a lambda")
        caller, call, calls = self._caller(at, function)
        self._refuse_explicit_self(caller, call, decorators)
        if function.args.kwarg is not None and function.args.kwarg.arg == name:
            if not path:
                raise Refusal(f"`{name}` at {file.at(at.node)} holds all keyword arguments")
            if any(each.arg == path[0] for each in parameters(function)):
                raise Refusal(f"`{path[0]}` is a parameter of its own at {file.at(function)}")
            return self._argument(caller, call, calls, path[0], (), DEFAULTS.get(path[0], ()), path[1:])
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        is_static = any(last_name(each) == "staticmethod" for each in decorators)
        names = names[1:] if file.class_of(function) is not None and not is_static else names
        default = (
            () if any(each.arg == name for each in function.args.posonlyargs) else default_of_parameter(function, name)
        )
        return self._argument(caller, call, calls, name, names, default, path)

    def _caller(self, at: _At, function: Any) -> tuple[SourceFile, ast.Call, tuple[CallSite, ...]]:
        """The call by which a function ran: as seen, or the only one there is."""
        file, cls = at.file, at.file.class_of(function)
        is_init = cls is not None and function.name == "__init__"
        calls: tuple[CallSite, ...] = ()
        if cls is not None and is_init:
            guards.refuse_many_bases(self.sources, cls)
            given = " ".join([*self.sources.bases(cls), cls.name])
            if declared.by_lightning_cli(self._code) and ("DataModule" in given or "LightningModule" in given):
                raise _NoCall
        if at.calls and file.function_of(at.node) == function:
            calls = at.calls[1:]
            if not calls or not self._is_users(calls[0]):
                by = Path(calls[0].file).name if calls else "something that was not seen"
                raise Refusal(f"`{function.name}` is called by {by}, which is not yours to edit")
            caller = self.sources.file(calls[0].file)
            found = [(caller, each) for each in caller.calls_at(calls[0]) if self._calls(caller, each, function, cls)]
            self._passed.append(calls[0])
        else:
            found = list(self._all_calls(function, cls))
        if not found and is_init and declared.by_lightning_cli(self._code):
            raise _NoCall
        if len(found) != 1:
            name = cls.name if cls is not None and is_init else function.name
            where = f"at {', '.join(each.at(node) for each, node in found)}" if found else "nowhere by its name"
            raise Refusal(f"`{name}` is called {where}: expected one call")
        caller, call = found[0]
        if isinstance(call.func, ast.Name) and len(caller.bindings(call.func.id, call)) != 1:
            raise Refusal(f"`{call.func.id}` at {caller.at(call)} is bound in more than one place")
        if isinstance(call.func, ast.Attribute):
            self._refuse_stored(call.func.attr)
        return caller, call, calls

    def _calls(self, file: SourceFile, call: ast.Call, function: Any, cls: ast.ClassDef | None) -> bool:
        name = self._original_name(file, call.func)
        if function.name != "__init__" or cls is None:
            return bool(name == function.name)
        return name == "__init__" or name in self.sources.constructed_as(cls)

    def _original_name(self, file: SourceFile, func: ast.AST) -> str:
        """A function's or class's name where it is defined, though it may be imported under another."""
        bound = file.bindings(func.id, func) if isinstance(func, ast.Name) else []
        alias = bound[0].node if len(bound) == 1 else None
        return alias.name.rpartition(".")[2] if isinstance(alias, ast.alias) else last_name(func)

    def _all_calls(self, function: Any, cls: ast.ClassDef | None) -> Iterator[tuple[SourceFile, ast.Call]]:
        """All calls of a function by its name; another use of its name raises Refusal."""
        names = self.sources.constructed_as(cls) if function.name == "__init__" and cls is not None else {function.name}
        known = self.sources.known_as(names)
        self._reads.refuse_named_in_text(function.name)
        for name in names if cls is not None and function.name == "__init__" else ():
            if texts := [each for each in self.sources.all if each.has_text(name)]:
                raise Refusal(f"`{name}` is named by a text in {Path(texts[0].name).name}: what makes it is not seen")
        for file in self.sources.all:
            for call in (each for each in file.nodes if isinstance(each, ast.Call) and function.name == "__init__"):
                by_type = isinstance(call.func, ast.Call) and last_name(call.func.func) == "type"
                if by_type or last_name(call.func) in ("cls", "__class__"):
                    raise Refusal(f"a class is made at {file.at(call)} in a way that is not followed")
            for node in (each for each in file.nodes if isinstance(each, (ast.Name, ast.Attribute))):
                parent = file.parents.get(node)
                is_called = isinstance(parent, ast.Call) and parent.func is node
                if is_called and last_name(node) == "__init__" and function.name == "__init__":
                    around = next((each for each in file.outwards(node) if isinstance(each, ast.ClassDef)), None)
                    if around is not None and any(last_name(base) in names for base in around.bases):
                        yield file, parent  # type: ignore[misc]
                elif is_called and last_name(node) in known and self._original_name(file, node) in names:
                    yield file, parent  # type: ignore[misc]
                elif last_name(node) in names and isinstance(node.ctx, ast.Load) and not is_called:
                    harmless = isinstance(parent, (ast.ClassDef, ast.arg, ast.Attribute, *FUNCTIONS))
                    harmless &= getattr(parent, "attr", "") not in ("load_from_checkpoint", "__subclasses__")
                    harmless |= isinstance(parent, ast.AnnAssign) and parent.annotation is node
                    if not harmless and "CLI" not in last_name(parent.func if isinstance(parent, ast.Call) else node):
                        raise Refusal(f"`{last_name(node)}` is used at {file.at(node)} in a way that is not followed")

    # ---- members of objects ----

    def _of_member(self, at: _At, base: ast.expr, key: str, path: tuple[str, ...]) -> Edit:
        """An attribute or a key: ``self.workers``, ``args.workers``, ``config["workers"]``."""
        cls, own = self._own_class(at.file, base), None
        if cls is None and last_name(base) == "hparams" and isinstance(base, ast.Attribute):
            own = self._own_class(at.file, base.value)
        for file in self.sources.all:
            if path:
                self._reads.note_whole(at.node, file.member_reads(key), file, path)
            else:  # this member has the value
                self._reads.note(at.node, file.member_reads(key), file)
        self._reads.refuse_named_in_text(key, constant=True)
        try:
            if cls is not None:
                return self._of_class(cls, at.file, (key, *path))
            if own is not None:
                self._refuse_stored(key)
                for file in self.sources.all:
                    self._reads.note_whole(base, file.member_reads("hparams"), file, (key,))
                return self._of_hparams(at, own, key, path)
        except _NoCall:
            return self._from_lightning_cli(cls or own, key)
        self._refuse_stored(key, but_of_self=True)
        return self._resolve(replace(at, node=base), (key, *path))

    def _refuse_stored(self, name: str, *, but_of_self: bool = False) -> None:
        for file in self.sources.all:
            for node in file.stores(name):
                of_self = isinstance(node, ast.Attribute) and self._own_class(file, node.value) is not None
                if not (but_of_self and of_self):
                    raise Refusal(f"`{name}` may be set at {file.at(node)} as well")

    def _own_class(self, file: SourceFile, base: ast.AST) -> ast.ClassDef | None:
        """The class whose object a name is, if that is the first parameter of one of its methods."""
        if not isinstance(base, ast.Name):
            return None
        methods = [
            each for each in file.outwards(base) if isinstance(each, FUNCTIONS) and file.class_of(each) is not None
        ]
        named = [each for each in methods if parameters(each) and parameters(each)[0].arg == base.id]
        if not named or isinstance(named[0], ast.Lambda):
            return None
        if any(last_name(each) == "staticmethod" for each in named[0].decorator_list):
            return None
        bound = file.bindings(base.id, base)
        return file.class_of(named[0]) if len(bound) == 1 and bound[0].scope is named[0] else None

    def _of_class(self, cls: ast.ClassDef, file: SourceFile, path: tuple[str, ...]) -> Edit:
        """An attribute of a class's objects: what is assigned to it in a method, or in the class's body."""
        key = path[0]
        stored = [(each, node) for each in self.sources.all for node in each.stores(key)]
        guards.refuse_many_bases(self.sources, cls)
        if not stored:
            guards.refuse_overridden(self.sources, cls, key)
            return self._of_class_body(cls, file, path)
        where, store = stored[0]
        parent: Any = where.parents[store]
        owner = self._own_class(where, store.value) if isinstance(store, ast.Attribute) else None
        if (
            len(stored) > 1
            or owner is None
            or not isinstance(parent, (ast.Assign, ast.AnnAssign))
            or parent.value is None
            or len(targets_of(parent)) != 1
        ):
            listed = ", ".join(each.at(node) for each, node in stored)
            raise Refusal(f"`{key}` is set at {listed}: expected one plain assignment to it in its class")
        if any(last_name(target) == key for each in cls.body for target in targets_of(each)):
            raise Refusal(f"`{key}` is set in the body of `{cls.name}` and at {where.at(store)}")
        if owner is not cls and owner.name not in self.sources.bases(cls):
            raise Refusal(f"`{key}` is set at {where.at(store)}, in another class than `{cls.name}`")
        return self._resolve(_At(where, parent.value), path[1:])

    def _of_class_body(self, cls: ast.ClassDef, file: SourceFile, path: tuple[str, ...]) -> Edit:
        """A class attribute, or a dataclass's default."""
        plain = [each for each in cls.body if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None]
        named = [each for each in plain if any(last_name(target) == path[0] for target in targets_of(each))]
        found = [each.value for each in named if len(targets_of(each)) == 1]
        if len(found) != 1 or len(named) != 1 or found[0] is None:
            raise Refusal(f"`{path[0]}` of `{cls.name}` at {file.at(cls)} is not written there, once")
        value = found[0]
        if isinstance(value, ast.Call) and last_name(value.func) == "field":
            if any(each.arg in ("converter", "validator", "init") for each in value.keywords):
                raise Refusal(f"`{path[0]}` of `{cls.name}` is changed on its way, at {file.at(value)}")
            value = next((each.value for each in value.keywords if each.arg == "default"), value)
        return self._resolve(_At(file, value), path[1:])

    def _of_hparams(self, at: _At, cls: ast.ClassDef, key: str, path: tuple[str, ...]) -> Edit:
        """``self.hparams.key``: the parameter of a constructor that saves its arguments."""
        init: Any = next((each for each in cls.body if getattr(each, "name", "") == "__init__"), None)
        calls = [each for each in ast.walk(init) if isinstance(each, ast.Call)] if init is not None else []
        saves = [each for each in calls if last_name(each.func) == "save_hyperparameters"]
        if len(saves) != 1 or saves[0].args or not any(each.arg == key for each in parameters(init)):
            raise Refusal(f"`{shortened(at.node)}` at {at.file.at(at.node)} cannot be followed")
        if len(at.file.bindings(key, saves[0])) != 1:
            raise Refusal(f"`{key}` is set again in `{cls.name}.__init__` at {at.file.at(init)}")
        self._reads.note(at.node, at.file.reads(key, init), at.file)
        return self._from_caller(_At(at.file, saves[0]), init, key, path)

    def _of_call(self, at: _At, node: ast.Call, path: tuple[str, ...]) -> Edit:
        """A member of what a call gives."""
        file, name = at.file, last_name(node.func)
        if name in ("parse_args", "parse_known_args") and len(path) == 1:
            if node.args or node.keywords:
                raise Refusal(f"`{shortened(node)}` at {file.at(node)} is given its arguments there")
            return self._default_of_option(*declared.option_of(self.sources.all, path[0]))
        if declared.reads_yaml(node):
            target = declared.opened(self._code, file, node)
            return declared.in_yaml(self._code, [target], [path], self._now, self._value)
        if name in ("dict", "SimpleNamespace", "Namespace") and not node.args:
            return self._of_pairs(at, [(each.arg, each.value) for each in node.keywords], path)
        found, where = self.sources.definition(file, node.func)
        if isinstance(found, ast.ClassDef):
            return self._of_object(at, found, where, path)
        if isinstance(found, ast.FunctionDef) and not found.decorator_list:
            ends = [each for each in ast.walk(found) if isinstance(each, (ast.Return, ast.Yield, ast.YieldFrom))]
            if len(ends) == 1 and isinstance(ends[0], ast.Return) and ends[0].value is not None:
                return self._resolve(_At(where, ends[0].value), path)
        raise Refusal(f"`{shortened(node)}` at {file.at(node)} cannot be followed")

    def _of_object(self, at: _At, cls: ast.ClassDef, file: SourceFile, path: tuple[str, ...]) -> Edit:
        """An attribute of an object: the argument of its class's constructor, or what the class's body says."""
        if any(getattr(each, "name", "") in ("__init__", "__post_init__") for each in cls.body):
            return self._of_class(cls, file, path)
        guards.refuse_made_by_base(self.sources, file, cls)
        guards.refuse_many_bases(self.sources, cls)
        call = at.node
        given = next((each.value for each in call.keywords if each.arg == path[0]), None)
        if given is not None:
            return self._resolve(replace(at, node=given), path[1:])
        if call.args or any(each.arg is None for each in call.keywords):
            raise Refusal(f"`{path[0]}` is not given by its name at {at.file.at(call)}")
        calls = self.sources.calls_of({cls.name})
        made = [(each, node) for each, node in calls if self._original_name(each, node.func) == cls.name]
        if len(made) > 1:
            raise Refusal(f"`{cls.name}` is made at {', '.join(each.at(node) for each, node in made)}: expected once")
        return self._of_class_body(cls, file, path)

    # ---- what is given from outside ----

    def _default_of_option(self, file: SourceFile, call: ast.Call) -> Edit:
        self._is_text = True
        guards.refuse_other_options(self.sources)
        return self._resolve(_At(file, declared.default_of(self._code, file, call, self._value)))

    def _from_environment(self, at: _At, name: str, default: ast.expr | None) -> Edit:
        if name in self._code.variables or default is None:
            raise Refusal(
                f"the environment gives {name}, read at {at.file.at(at.node)}: set {name}={self._value} there"
            )
        for file in self.sources.all:
            named = [each for each in file.nodes if isinstance(each, ast.Constant) and each.value == name]
            self._reads.note(at.node, [each for each in named if file.parents[each] is not at.node], file)
        return self._resolve(replace(at, node=default))

    def _from_lightning_cli(self, cls: ast.ClassDef | None, key: str) -> Edit:
        assert cls is not None
        bases = [*self.sources.bases(cls), cls.name]
        return declared.of_lightning_cli(self._code, bases, key, self._now, self._value)
