"""The real Safety-Gymnasium 1.0.0 as ordinary Gymnasium envs, for those who have it installed.

The package pins Gymnasium 0.28.1 and MuJoCo 2.3.3 and does not import on Python 3.11; `make` brings
it up there, and turns what `step` returns into Gymnasium's five values with `info["cost"]`. Nothing
of what an episode consists of is changed. For comparisons with the native tasks, which cannot live
in the same process: they need Gymnasium 1.1. `INSTALL` says how to build an environment for it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

_SUPPORTED = {
    "safety-gymnasium": ("1.0",),
    "gymnasium": ("0.28", "0.29"),
    "mujoco": ("2.3",),
    "numpy": ("1",),
}
"""The versions that work, by their first numbers; the package asks for more than it needs."""
INSTALL = (
    "install it in an environment of Python 3.10 or 3.11 that has pbcrl: pip install "
    "gymnasium==0.28.1 mujoco==2.3.3 'numpy<2' gymnasium-robotics==1.2.2 pyyaml xmltodict, then "
    "pip install --no-deps safety-gymnasium==1.0.0, whose own pins need not be kept (in a checkout "
    "of pbcrl, `make parity-env` builds one in .venv-parity)"
)
"""How to have the real package."""


def make(id: str, **kwargs: Any) -> gymnasium.Env[NDArray[np.float64], NDArray[np.float64]]:  # noqa: A002
    """Make an env of the real Safety-Gymnasium that reports the cost of a step in `info["cost"]`.

    Observations are flat and float64. The other costs that Safety-Gymnasium reports, by cause, stay
    in the info under their names. The starry sky is left out of the model: resets are then 80 times
    faster, episodes the same to the last bit, and rendered frames have a plain sky.

    Args:
        id: Safety-Gymnasium's id, such as "SafetyPointGoal1-v0" or "SafetyHumanoidVelocity-v1".
        kwargs: Passed on: `render_mode`, `width`, `height`, `camera_id`, `max_episode_steps` and
            others.

    Raises:
        ImportError: If Safety-Gymnasium is not installed, or beside versions that do not fit.
        ValueError: If Safety-Gymnasium has no such id.
    """
    _check_versions()
    package = _import_safety_gymnasium()
    known: set[str] = package.utils.registration.safe_registry
    if id not in known:
        near = difflib.get_close_matches(id, sorted(known), n=3, cutoff=0.4)
        raise ValueError(
            f"id must be one of Safety-Gymnasium's, got {id!r}; did you mean {' or '.join(near)}?"
        )
    env: gymnasium.Env[Any, Any] = package.make(id, **kwargs)
    return _CostInInfo(env)


class _CostInInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Moves the cost, which Safety-Gymnasium returns as a sixth value, into the info."""

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        answer: Any = self.env.step(action)  # six values, unlike what Gymnasium declares
        obs, reward, cost, terminated, truncated, info = answer
        return obs, float(reward), terminated, truncated, {**info, "cost": float(cost)}


def _check_versions() -> None:
    for name, prefixes in _SUPPORTED.items():
        try:
            found = version(name)
        except PackageNotFoundError as error:
            raise ImportError(
                f"the real Safety-Gymnasium needs {name} {' or '.join(prefixes)}, but {name} is "
                f"not installed; {INSTALL}"
            ) from error
        if not any(f"{found}.".startswith(f"{prefix}.") for prefix in prefixes):
            raise ImportError(
                f"the real Safety-Gymnasium needs {name} {' or '.join(prefixes)}, got {name} "
                f"{found}; {INSTALL}"
            )


def _import_safety_gymnasium() -> ModuleType:
    if "safety_gymnasium" in sys.modules:
        return sys.modules["safety_gymnasium"]
    # Its table of colours is imported before it and under its name, with arrays that have a hash:
    # since Python 3.11 a dataclass refuses defaults without one, and its defaults are arrays.
    package = importlib.util.find_spec("safety_gymnasium")
    assert package is not None
    assert package.origin is not None
    name = "safety_gymnasium.assets.color"
    path = Path(package.origin).parent / "assets" / "color.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    color = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(color)
    color.COLOR.update({key: rgba.view(_HashableArray) for key, rgba in color.COLOR.items()})
    sys.modules[name] = color
    try:
        imported = importlib.import_module("safety_gymnasium")
        world = importlib.import_module("safety_gymnasium.world")
    except BaseException:
        del sys.modules[name]
        raise
    loader = vars(world)["yaml"].FullLoader
    vars(world)["yaml"] = SimpleNamespace(load=_load_without_sky, FullLoader=loader)
    return imported


class _HashableArray(np.ndarray[Any, np.dtype[Any]]):
    __hash__ = object.__hash__  # type: ignore[assignment]


def _load_without_sky(stream: Any, Loader: Any) -> Any:  # noqa: N803
    """`yaml.load` for the assets of a world; its sky is six pictures, decoded at every reset."""
    assets = importlib.import_module("yaml").load(stream, Loader=Loader)
    assets["textures"]["skybox"] = {
        "@type": "skybox",
        "@builtin": "flat",
        "@rgb1": "0.6 0.7 0.8",
        "@width": "2",
        "@height": "12",
    }
    return assets
