"""The command `pbcrl`: runs the scripts of this folder, as `python SCRIPT.py` does.

pbcrl train ppo_lag_pbcrl --env-id PointHazards-v0
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent

COMMANDS = {
    "demo": ("demo.py", "scripts", "learn a cost on the toy, in a few minutes, and draw it"),
    "train": ("", "scripts", "train a policy: pbcrl train SCRIPT [flags]"),
    "label": ("", "label", "answer the questions of a label folder"),
    "evaluate": ("evaluate.py", "scripts", "play a finished run, compare learned with true costs"),
    "certify": ("certify.py", "scripts", "bound how often a finished run's policy is unsafe"),
    "report": ("paper/report.py", "scripts", "tables and figures of finished runs"),
    "benchmark": ("paper/benchmark.py", "benchmark", "the paper's experiments"),
}
"""File, extra that it needs, and what it does."""

_OURS = "pbcrl", "pbcrl_envs", "pbcrl_scripts", "pbcrl_script_utils", "presets", "evaluate"
_EXTRAS = {"ppo_lag_llm": "scripts,llm"}
"""Of training scripts that need more than the others."""


def trainers() -> list[str]:
    """Names of the training scripts."""
    return sorted(path.stem for path in SCRIPTS.glob("ppo_*.py"))


def usage() -> str:
    """What `pbcrl --help` prints."""
    commands = "\n".join(f"  {name:<10} {does}" for name, (_, _, does) in COMMANDS.items())
    return (
        f"usage: pbcrl COMMAND [flags]; pbcrl COMMAND --help lists the flags\n\n{commands}\n\n"
        f"SCRIPT is {', '.join(trainers())}, or a file of your own: copy one from\n{SCRIPTS}, "
        "edit it, and run pbcrl train ./my_copy.py"
    )


def script_of(words: list[str]) -> tuple[Path, list[str]]:
    """Return the script that a `pbcrl train` command line names, and its flags.

    Raises:
        SystemExit: If there is no such script.
    """
    name, flags = (words[0], words[1:]) if words else ("", [])
    if name in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    path = Path(name) if name.endswith(".py") else SCRIPTS / f"{name}.py"
    if not (path.is_file() and (name in trainers() or name.endswith(".py"))):
        raise SystemExit(
            f"error: pbcrl train runs {', '.join(trainers())} or a .py file, got "
            f"{name or 'nothing'!r}; pbcrl train ppo_lag_pbcrl --help lists the flags"
        )
    return path, flags


def main(argv: list[str] | None = None) -> None:
    """Run a command; a missing optional library is named with its extra."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return
    command, flags = words[0], words[1:]
    if command == "--version":
        import pbcrl

        print(f"pbcrl {pbcrl.__version__}")
        return
    if command not in COMMANDS:
        raise SystemExit(
            f"error: a command is {', '.join(COMMANDS)}, got {command!r}; pbcrl --help explains"
        )
    file, extra, _ = COMMANDS[command]
    try:
        if command == "label":
            from pbcrl.label.__main__ import main as label

            label(flags, prog="pbcrl label")
            return
        path, flags = script_of(flags) if command == "train" else (SCRIPTS / file, flags)
        extra = _EXTRAS.get(path.stem, extra)
        run(path, flags)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in _OURS:
            raise
        raise SystemExit(
            f"error: pbcrl {command} needs {error.name}, which is not installed; "
            f"pip install 'pbcrl[{extra}]'"
        ) from error


def run(path: Path, flags: list[str]) -> None:
    """Run a script as `python PATH FLAGS` does."""
    sys.argv = [str(path), *flags]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
