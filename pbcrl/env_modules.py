"""Which modules the id of an env may import: installed ones, and those that the user has named.

"module:Id-v0" imports `module`, which is any code. Ids also stand in files, in runs and in label
folders, and a folder that comes from somebody else can hold code and an id that names it. So an id
from a file imports what is installed, and nothing else; whoever has modules of their own names them
on the command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate
from pathlib import Path

_MARKS = "args.json", "labels.sqlite", "manifest.safetensors"
"""One of these is in every folder of a run, of labels and of a dataset."""


def registered(env_id: str, *, by_user: bool = False) -> str:
    """Import the module of "module:Id-v0", which registers an env, and return "Id-v0".

    A module that is imported already stays as it is, and an id without a module imports nothing.
    Any other module must be installed: found without the working directory, with an `__init__.py`
    if it is a package, and outside of all folders of runs, labels and datasets.

    Args:
        env_id: As `gymnasium.make` takes it.
        by_user: The user has typed it, so that no file decides: the module may lie in the working
            directory, which is searched first from then on, unless it is a folder of data.

    Raises:
        ValueError: If the module is not there, or must not be imported.
    """
    module, _, plain_id = env_id.rpartition(":")
    if not module or module in sys.modules:
        return plain_id
    try:
        top = _top(module)
        elsewhere, here = _find_elsewhere(top), PathFinder.find_spec(top, [os.getcwd()])
        if here is not None and _is_namespace(here) and elsewhere is not None:
            here = None  # any folder there is one, and Python itself prefers what is none
        if not by_user or here is None:
            with _searched(path_elsewhere()):
                _import(module, env_id, by_user=by_user)
        elif elsewhere is not None and elsewhere.origin not in (None, here.origin):
            raise ValueError(
                f"a module must have one meaning, but {top} of {env_id!r} is both {here.origin} "
                f"and {elsewhere.origin}; rename yours, or work in another folder"
            )
        else:
            sys.path[:] = dict.fromkeys([os.getcwd(), *sys.path])
            _import(module, env_id, by_user=True)
    except ModuleNotFoundError as error:
        if by_user:
            raise ValueError(
                "--env-id 'module:Id-v0' imports the module, from this folder or an installed "
                f"package, got {env_id!r} ({error}); run in the folder of the module, or install "
                "what is missing"
            ) from error
        raise _not_named(env_id, str(error)) from error
    return plain_id


def env_id_flag(env_id: str) -> list[str]:
    """The words by which a command line has to name an env whose module is not installed."""
    top = env_id.rpartition(":")[0].partition(".")[0]
    if not top.isidentifier():  # nor is "", where there is no module
        return []
    spec = _find_elsewhere(top)
    return ["--env-id", env_id] if spec is None or _is_namespace(spec) else []


def path_elsewhere() -> list[str]:
    """`sys.path` without the working directory, which Python may have put there by itself."""
    here = Path.cwd().resolve()
    return [path for path in sys.path if path and Path(path).resolve() != here]


def data_folder_of(path: Path) -> Path | None:
    """The folder of a run, of labels or of a dataset in which a file lies, by links or without."""
    for folder in {path.absolute().parent, path.parent.resolve(), path.resolve().parent}:
        for above in (folder, *folder.parents):
            if any((above / mark).exists() for mark in _MARKS):
                return above
    return None


def _import(module: str, env_id: str, *, by_user: bool) -> None:
    """Import a module once it and the packages around it have been looked at, outer ones first."""
    for name in accumulate(module.split("."), "{}.{}".format):
        spec = importlib.util.find_spec(name)  # imports the packages around it
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        if _is_namespace(spec) and not by_user:
            raise _not_named(env_id, f"{name} is a folder without an __init__.py")
        files = [Path(path, "__init__.py") for path in spec.submodule_search_locations or ()]
        files += [Path(spec.origin)] if spec.has_location and spec.origin else []
        for file in files:
            if folder := data_folder_of(file):
                raise ValueError(
                    f"no code is imported from a folder of data, but {name} of {env_id!r} lies in "
                    f"{folder}, which holds a run, labels or a dataset; move the module out of it, "
                    "and work in the folder of your modules"
                )
    importlib.import_module(module)


def _top(module: str) -> str:
    if not all(part.isidentifier() for part in module.split(".")):
        raise ModuleNotFoundError(f"{module!r} is no name of a module")
    return module.partition(".")[0]


def _not_named(env_id: str, finding: str) -> ValueError:
    return ValueError(
        f"an env id from a file imports installed modules only, and {env_id!r} names none "
        f"({finding}); if the module is your own, say so in its folder: --env-id {env_id} (in "
        "Python, import it first)"
    )


def _is_namespace(spec: ModuleSpec) -> bool:
    return spec.origin is None and spec.submodule_search_locations is not None


def _find_elsewhere(top: str) -> ModuleSpec | None:
    """Where a module would come from; nothing is imported, and what is imported does not count."""
    with _searched(path_elsewhere()):
        found = (finder.find_spec(top, None) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)


@contextmanager
def _searched(path: list[str]) -> Iterator[None]:
    """Search these folders for modules, not `sys.path`; what is added to that meanwhile stays."""
    before = sys.path[:]
    sys.path[:] = path
    try:
        yield
    finally:
        sys.path[:] = before + [added for added in sys.path if added not in path]
