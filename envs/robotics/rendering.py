"""Pictures of MuJoCo states: as arrays of pixels off the screen, or in a window.

The renderer does not depend on tasks: what stands in the scene beside the bodies of the model is
passed to it as marks. It works on a copy of the model with separate data, so drawing cannot change
a simulation.
"""

from __future__ import annotations

import atexit
import copy
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mujoco
import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from pbcrl_envs.robotics.opengl import GLContext, create_context, find_backend, require_display

FloatArray = NDArray[np.float64]
Image = NDArray[np.uint8]

MODES = ("human", "rgb_array")
"""What a single environment offers; a vector environment has no window."""

_MAX_MARKS = 500
_MAX_SIZE = 8192  # pixels


class Camera(NamedTuple):
    """Where a picture is taken from: a point that is looked at, and the way to it."""

    target: tuple[float, float, float]
    """The point in the middle of the picture, in metres."""
    distance: float
    """From the camera to that point, in metres."""
    azimuth: float
    """Direction of view in the plane, in degrees counter-clockwise from the x axis."""
    elevation: float
    """Direction of view above the plane, in degrees: -90 looks straight down."""
    field_of_view: float = 45.0
    """Vertical opening angle in degrees."""


class Mark(NamedTuple):
    """One shape that is drawn and is no part of the model."""

    shape: mujoco.mjtGeom
    """Its kind of geom."""
    position: tuple[float, float, float]
    """Of its middle, in metres."""
    size: tuple[float, float, float]
    """As in a model: radius of a sphere, radius and half height of a cylinder, the rest 0."""
    colour: tuple[float, float, float, float]
    """Red, green, blue and opacity in [0, 1]."""


class Renderer:
    """Draws states of one model.

    Args:
        model: The model; a copy of it is drawn.
        mode: "rgb_array" returns pixels, "human" shows a window in real time.
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        seconds: Simulated time between two pictures, which the window keeps to.

    Raises:
        ValueError: If the mode or the size is none of the possible ones.
        DependencyNotInstalled: If the library that draws, or the display, is missing. Whatever
            only shows when the first picture is drawn is raised by then.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        mode: str,
        width: int = 480,
        height: int = 480,
        seconds: float = 0.02,
    ) -> None:
        for name, pixels in (("width", width), ("height", height)):
            if not 1 <= pixels <= _MAX_SIZE:
                raise ValueError(
                    f"{name} must be between 1 and {_MAX_SIZE} pixels, got {pixels}; "
                    "480 is the default"
                )
        if mode == "human":
            require_display()
        elif mode == "rgb_array":
            self._backend = find_backend()
        else:
            raise ValueError(f"render_mode must be one of {', '.join(MODES)} or None, got {mode!r}")
        self._mode = mode
        self._model = copy.copy(model)
        self._model.vis.global_.offwidth, self._model.vis.global_.offheight = width, height
        # A third of the default's facets: most of a picture's time goes into round shapes.
        self._model.vis.quality.numslices, self._model.vis.quality.numstacks = 20, 10
        self._data = mujoco.MjData(self._model)
        self._seconds = seconds
        # Made by the first picture, in the process and thread that draw it.
        self._surface: _Sheet | _Window | None = None

    def draw(
        self, state: Mapping[str, FloatArray], *, camera: Camera, marks: Sequence[Mark] = ()
    ) -> Image | None:
        """Draw one state.

        Args:
            state: Fields of MuJoCo's data by name, such as `qpos` and `mocap_pos`; fields that are
                left out keep their values of the last picture.
            camera: Where it is seen from; in a window the mouse turns it further.
            marks: What else stands there.

        Returns:
            The picture, uint8 (height, width, 3); None in a window.

        Raises:
            DependencyNotInstalled: If OpenGL cannot draw, or the display cannot be opened.
        """
        for name, value in state.items():
            getattr(self._data, name)[...] = value
        mujoco.mj_forward(self._model, self._data)
        # The opening angle of MuJoCo's free camera is the model's.
        self._model.vis.global_.fovy = camera.field_of_view
        if self._surface is None:
            self._surface = self._open()
        if isinstance(self._surface, _Window):
            self._surface.show(self._data, camera, marks, seconds=self._seconds)
            return None
        return self._surface.draw(self._data, camera, marks)

    def close(self) -> None:
        """Close the window and release what OpenGL holds; the next picture opens it again."""
        if self._surface is not None:
            self._surface.close()
            self._surface = None

    def _open(self) -> _Sheet | _Window:
        if self._mode == "human":
            return _Window(self._model)
        return _Sheet(self._model, self._backend)


class _Canvas:
    """Draws into the OpenGL context that is current: belongs to the thread that draws."""

    def __init__(self, model: mujoco.MjModel, framebuffer: mujoco.mjtFramebuffer) -> None:
        self._model = model
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_setBuffer(framebuffer.value, self.context)
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + _MAX_MARKS)
        self._options = mujoco.MjvOption()
        # Reflections and shadows would take half of the time where a CPU draws.
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False

    def draw(
        self,
        data: mujoco.MjData,
        camera: mujoco.MjvCamera,
        marks: Sequence[Mark],
        rect: mujoco.MjrRect,
    ) -> None:
        # Else lights and endless floors would be put where the last picture was taken from.
        mujoco.mjv_updateCamera(self._model, data, camera, self._scene)
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(
            self._model, data, self._options, None, camera, everything, self._scene
        )
        _add_marks(self._scene, marks)
        mujoco.mjr_render(rect, self._scene, self.context)


class _Sheet:
    """Where pictures off the screen are drawn."""

    def __init__(self, model: mujoco.MjModel, backend: str) -> None:
        width, height = model.vis.global_.offwidth, model.vis.global_.offheight
        self._rect = mujoco.MjrRect(0, 0, width, height)
        self._gl = create_context(backend, width, height)
        self._gl.make_current()
        self._canvas = _Canvas(model, mujoco.mjtFramebuffer.mjFB_OFFSCREEN)
        self._camera = mujoco.MjvCamera()
        self.close = _finalize(self, _free_sheet, self._gl, self._canvas.context)

    def draw(self, data: mujoco.MjData, camera: Camera, marks: Sequence[Mark]) -> Image:
        self._gl.make_current()
        _point(self._camera, camera)
        self._canvas.draw(data, self._camera, marks, self._rect)
        image = np.empty((self._rect.height, self._rect.width, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(image, None, self._rect, self._canvas.context)
        return np.ascontiguousarray(image[::-1])  # OpenGL begins at the bottom


def _finalize(owner: object, free: Callable[..., None], *args: Any) -> weakref.finalize[..., Any]:
    """Free what `owner` holds when it is gone, and at exit before the libraries that freeing needs.

    `weakref` would see to the exit too, but in the place of the process's first finalizer, of
    whatever package, which may be after EGL has closed its display.
    """
    close = weakref.finalize(owner, free, *args)
    close.atexit = False
    atexit.register(close)  # the last registered is the first called; a second call does nothing
    return close


def _free_sheet(gl: GLContext, context: mujoco.MjrContext) -> None:
    gl.make_current()
    context.free()
    gl.free()


class _Window:
    """A window that shows pictures; dragging turns the view, with the right button it zooms."""

    def __init__(self, model: mujoco.MjModel) -> None:
        import glfw  # comes with MuJoCo

        self._glfw: Any = glfw
        width, height = model.vis.global_.offwidth, model.vis.global_.offheight
        with warnings.catch_warnings():  # GLFW's wording of the error below
            warnings.simplefilter("ignore")
            window = glfw.init() and glfw.create_window(width, height, "pbcrl", None, None)
        if not window:
            raise DependencyNotInstalled(
                "a window needs a display that can be opened, but GLFW could not open one on what "
                'DISPLAY or WAYLAND_DISPLAY names; correct it, or use render_mode="rgb_array"'
            )
        self._window = window
        glfw.make_context_current(window)
        glfw.swap_interval(0)  # time is kept here, not by the screen
        self._canvas = _Canvas(model, mujoco.mjtFramebuffer.mjFB_WINDOW)
        self.close = _finalize(self, _free_window, glfw, window, self._canvas.context)
        self._camera = mujoco.MjvCamera()
        self._cursor = (0.0, 0.0)
        self._azimuth, self._elevation, self._zoom = 0.0, 0.0, 1.0  # added by the mouse
        self._due = time.perf_counter()

    def show(
        self, data: mujoco.MjData, camera: Camera, marks: Sequence[Mark], *, seconds: float
    ) -> None:
        if not self.close.alive:  # the user has closed it
            return
        self._glfw.make_context_current(self._window)
        self._follow_mouse()
        _point(self._camera, camera)
        self._camera.azimuth += self._azimuth
        self._camera.elevation += self._elevation
        self._camera.distance *= self._zoom
        width, height = self._glfw.get_framebuffer_size(self._window)
        self._canvas.draw(data, self._camera, marks, mujoco.MjrRect(0, 0, width, height))
        self._glfw.swap_buffers(self._window)
        self._glfw.poll_events()
        if self._glfw.window_should_close(self._window):
            self.close()
        now = time.perf_counter()
        self._due = max(self._due + seconds, now)
        time.sleep(self._due - now)

    def _follow_mouse(self) -> None:
        cursor = self._glfw.get_cursor_pos(self._window)
        right, down = cursor[0] - self._cursor[0], cursor[1] - self._cursor[1]
        self._cursor = cursor
        if self._glfw.get_mouse_button(self._window, self._glfw.MOUSE_BUTTON_LEFT):
            self._azimuth -= 0.3 * right  # degrees per pixel
            self._elevation -= 0.3 * down
        if self._glfw.get_mouse_button(self._window, self._glfw.MOUSE_BUTTON_RIGHT):
            self._zoom *= 1.005**down


def _free_window(glfw: Any, window: Any, context: mujoco.MjrContext) -> None:
    glfw.make_context_current(window)
    context.free()
    glfw.destroy_window(window)


def _point(cam: mujoco.MjvCamera, camera: Camera) -> None:
    cam.type = mujoco.mjtCamera.mjCAMERA_FREE.value
    cam.lookat[:] = camera.target
    cam.distance = camera.distance
    cam.azimuth = camera.azimuth
    cam.elevation = camera.elevation


def _add_marks(scene: mujoco.MjvScene, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if scene.ngeom == scene.maxgeom:
            raise ValueError(f"at most {_MAX_MARKS} marks fit into a picture, got {len(marks)}")
        mujoco.mjv_initGeom(
            scene.geoms[scene.ngeom],
            mark.shape.value,
            np.array(mark.size, dtype=np.float64),
            np.array(mark.position, dtype=np.float64),
            np.eye(3).ravel(),
            np.array(mark.colour, dtype=np.float32),
        )
        scene.ngeom += 1
