"""Which OpenGL library draws pictures, and what to install where there is none.

Without a screen MuJoCo draws through EGL (on a graphics card, or in software) or through OSMesa
(always in software). Both are system libraries that no Python package brings along. `MUJOCO_GL`
chooses one; unset, the first that is installed is taken. Loads nothing before it is asked to.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
from typing import Any, Protocol

from gymnasium.error import DependencyNotInstalled

LIBRARIES = {"egl": ("libEGL.so.1", "libegl1"), "osmesa": ("libOSMesa.so.8", "libosmesa6")}
"""The system library of each way to draw without a screen, and the Debian package that has it."""

_OFF = ("disable", "disabled", "off", "false", "0")


def import_mujoco() -> None:
    """Import MuJoCo, and say what is missing where `MUJOCO_GL` names a library that is not there.

    MuJoCo loads what `MUJOCO_GL` names when it is imported, whether or not anything is drawn.

    Raises:
        DependencyNotInstalled: If that library is missing.
    """
    try:
        importlib.import_module("mujoco")
    except (AttributeError, OSError):  # PyOpenGL's ways to miss a library
        find_backend()
        raise


class GLContext(Protocol):
    """What MuJoCo's context classes have in common."""

    def make_current(self) -> None:
        """Draw here from now on."""

    def free(self) -> None:
        """Release everything."""


def find_backend() -> str:
    """Return how pictures are drawn off the screen: "egl", "osmesa" or "native".

    "native" is the window system's own way: that of macOS and Windows, and of Linux with
    `MUJOCO_GL=glfw` and a display.

    Raises:
        DependencyNotInstalled: If the library that `MUJOCO_GL` names is missing, or it is unset
            and there is none at all.
        ValueError: If `MUJOCO_GL` switches rendering off.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower().strip()
    if wanted in _OFF:
        raise ValueError(
            f"rendering needs OpenGL, but MUJOCO_GL={wanted} switches it off; unset MUJOCO_GL"
        )
    if platform.system() != "Linux":
        return "native"
    if wanted in LIBRARIES:
        library, package = LIBRARIES[wanted]
        if not _loads(library):
            raise DependencyNotInstalled(
                f"MUJOCO_GL={wanted} draws with the system library {library}, which is missing; "
                f"`apt-get install {package}` on Debian and Ubuntu, or unset MUJOCO_GL"
            )
        return wanted
    if wanted in ("glfw", "glx"):
        require_display()
        return "native"
    for backend, (library, _) in LIBRARIES.items():
        if _loads(library):
            return backend
    raise DependencyNotInstalled(
        f"drawing without a screen needs one of two system libraries, and neither is there; "
        f"on Debian and Ubuntu install {_packages()}"
    )


def create_context(backend: str, width: int, height: int) -> GLContext:
    """Return a context of the kind that `find_backend` chose, for pictures of this size.

    Raises:
        DependencyNotInstalled: If the library is there but cannot draw.
    """
    module = "mujoco.gl_context" if backend == "native" else f"mujoco.{backend}"
    try:
        context: GLContext = _context_class(module)(width, height)
    except (AttributeError, ImportError, RuntimeError) as error:
        raise DependencyNotInstalled(
            f"OpenGL through {backend} must be able to draw, but it failed ({error}); "
            f"set MUJOCO_GL to another of {', '.join(LIBRARIES)} before Python starts, and "
            f"install what it needs, on Debian and Ubuntu {_packages()}"
        ) from error
    return context


def require_display() -> None:
    """Refuse to open a window where there is no display.

    Raises:
        DependencyNotInstalled: If Linux has neither an X nor a Wayland display.
    """
    if platform.system() == "Linux" and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise DependencyNotInstalled(
            "a window needs a display, but neither DISPLAY nor WAYLAND_DISPLAY is set; use "
            'render_mode="rgb_array" here, or start this under `xvfb-run` or on a desktop'
        )


def _packages() -> str:
    return " or ".join(f"{package} ({library})" for library, package in LIBRARIES.values())


def _context_class(module: str) -> Any:
    return importlib.import_module(module).GLContext


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
