"""From a command line to a run: the recipe of a task, the arguments of a run that goes on."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tyro
from gymnasium.error import DependencyNotInstalled

from pbcrl.errors import PbcrlError
from pbcrl_script_utils.envs import import_env
from pbcrl_script_utils.recipes import recipe_lines, recipe_of
from pbcrl_script_utils.resume import resumed, stored_args
from pbcrl_script_utils.run import command_of

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C ended, as shells have it."""


@dataclass(frozen=True)
class _What:
    """The arguments on which others depend."""

    env_id: str | None = None
    label_folder: str | None = None
    resume: str | None = None


def parse(args_type: type[Any], words: list[str]) -> Any:
    """Return the arguments of a command line.

    Defaults are those of `args_type`, save what the recipe of the task has, or what the run had
    that `--resume` names.

    Raises:
        PbcrlError, ValueError: If that run cannot be resumed, or not so.
        SystemExit: If the command line is wrong, or asks for help.
    """
    path = str(sys.modules[args_type.__module__].__file__)
    script, prog = Path(path).stem, command_of(path)
    names = {field.name for field in fields(args_type)}
    if "resume" not in names:  # it trains nothing
        return tyro.cli(args_type, args=words, prog=prog)
    what = _what(words, prog)
    if what.resume is not None:
        stored = stored_args(args_type, Path(what.resume), script=script)
        return resumed(stored, tyro.cli(args_type, args=words, default=stored, prog=prog))
    recipe: dict[str, Any] = {}
    if "env_id" in names:
        env_id, by_people = what.env_id or "", what.label_folder is not None
        recipes = getattr(args_type, "recipes", script)
        recipe = recipe_of(env_id, script=recipes, by_people=by_people)
        recipe["env_id"] = what.env_id or tyro.MISSING
    default = args_type(**{name: value for name, value in recipe.items() if name in names})
    about = _wrapped(sys.modules[args_type.__module__].__doc__ or "")
    shown = replace(default, **{n: v for n, v in vars(what).items() if n in names and v})
    if lines := recipe_lines(shown):
        head = f"{about}\n\nRecipe of {what.env_id or '--label-folder'}:"
        about = "\n   ".join([head, *lines])
    return tyro.cli(args_type, args=words, default=default, prog=prog, description=about)


def _what(words: list[str], prog: str = "") -> _What:
    what, _ = tyro.cli(_What, args=words, return_unknown_args=True, add_help=False, prog=prog)
    return what


def _wrapped(text: str) -> str:
    """Fit a module's docstring into the terminal; tyro would join lines that are not indented."""
    width = min(100, shutil.get_terminal_size().columns)
    options: dict[str, Any] = {"break_on_hyphens": False, "subsequent_indent": "  "}
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(textwrap.fill(one, width, **options) for one in paragraphs)


def main(train: Callable[[Any], Any], args_type: type[Any], argv: list[str] | None = None) -> None:
    """Parse the arguments and train; errors that a user can fix are one line, not a traceback."""
    words = sys.argv[1:] if argv is None else argv
    try:
        args = parse(args_type, words)
        if env_id := _what(words).env_id:  # not what a file says: the user has typed it
            import_env(env_id, by_user=True)
        train(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # what reads the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (
        ArithmeticError,
        DependencyNotInstalled,
        LookupError,
        MemoryError,
        OSError,
        PbcrlError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if os.environ.get("PBCRL_TRACEBACK"):
            raise
        said = str(error) or "no message"
        if isinstance(error, ArithmeticError | LookupError | MemoryError | TypeError):
            said = f"{type(error).__name__}: {said}"
        sys.exit(f"error: {said}\n(PBCRL_TRACEBACK=1 shows where)")
