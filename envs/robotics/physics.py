"""The MuJoCo model of a navigation task: the agent on its floor, and whatever it can bump into.

A layout is pure state here: nothing is compiled again when it changes. Fixed objects that collide
are mocap bodies, and discs that touch nothing (goals, hazards) are not in the model at all. All
numbers are upstream's; solver settings are spelled out because engine defaults change.
"""

from __future__ import annotations

import mujoco

from pbcrl_envs.robotics.tasks import Kind, Objects, Task

TIMESTEP = 0.002
"""Seconds per physics step."""
SUBSTEPS = 10
"""Physics steps per environment step."""
HEIGHTS = {Kind.VASE: 0.1 - 4e-5, Kind.BUTTON: 0.1, Kind.GREMLIN: 0.1}
"""Height in metres at which a body of each kind starts; vases sink into the soft floor a little."""
GREMLIN_TARGET_HEIGHT = 0.2
"""Height that gremlins are pulled to: upstream adds their own to that of the moving frame."""

_WORLD = """
<mujoco>
  <option timestep="{timestep}" integrator="Euler" solver="Newton" cone="pyramidal" iterations="100"
          tolerance="1e-8">
    <flag autoreset="disable"/>
  </option>
  <default>
    <geom condim="6" density="1"/>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="3.5 3.5 0.1"/>
    <body name="agent" pos="0 0 0.1">
      <joint name="x" type="slide" axis="1 0 0" damping="0.01"/>
      <joint name="y" type="slide" axis="0 1 0" damping="0.01"/>
      <joint name="z" type="hinge" axis="0 0 1" damping="0.005"/>
      <geom name="agent" type="sphere" size="0.1" friction="1 0.01 0.01"/>
      <geom name="pointarrow" type="box" size="0.05 0.05 0.05" pos="0.1 0 0"/>
      <site name="agent"/>
    </body>
    {bodies}
  </worldbody>
  <equality>{welds}</equality>
  <actuator>
    <motor name="x" site="agent" gear="0.3 0 0 0 0 0" ctrlrange="-1 1" forcerange="-0.05 0.05"/>
    <velocity name="z" jointinparent="z" gear="0.3" kv="1" ctrlrange="-1 1"
              forcerange="-0.05 0.05"/>
  </actuator>
  <sensor>
    <accelerometer site="agent"/>
    <velocimeter site="agent"/>
    <gyro site="agent"/>
    <magnetometer site="agent"/>
    {contacts}
  </sensor>
</mujoco>
"""


def build_model(task: Task) -> mujoco.MjModel:
    """Compile the model of a task.

    State: qpos holds the agent's (x, y, heading), then position and quaternion of each vase and
    gremlin; mocap bodies are the buttons, then the gremlins' targets. Sensors: the 12 observed
    numbers, then one count of contacts with the agent per button and gremlin, in the task's order.
    """
    bodies, welds, contacts = [], [], []
    for group in task.objects:
        for i in range(group.num):
            name = f"{group.kind.value}{i}"
            bodies.append(_body(group, name))
            if group.kind is Kind.GREMLIN:
                # The explicit pose keeps mj_setConst from replacing it by that of the zero state.
                welds.append(
                    f'<weld body1="{name}target" body2="{name}" solref="0.02 1.5" '
                    'relpose="0 0 0 1 0 0 0"/>'
                )
            if group.kind in (Kind.BUTTON, Kind.GREMLIN):
                contacts.append(f'<contact body1="agent" body2="{name}" data="found"/>')
    model = mujoco.MjModel.from_xml_string(
        _WORLD.format(
            timestep=TIMESTEP,
            bodies="\n".join(bodies),
            welds="\n".join(welds),
            contacts="\n".join(contacts),
        )
    )
    for i in range(model.nbody):
        if model.body(i).name.startswith("gremlin") and model.body_dofnum[i]:
            # MuJoCo 2.3.3, which the tasks were tuned on, scaled all six rows of a weld by the
            # translational inverse weight. With the rotational one, 150 times larger, a gremlin
            # that is bumped starts to spin.
            model.body_invweight0[i, 1] = model.body_invweight0[i, 0]
    return model


def _body(group: Objects, name: str) -> str:
    cube = f'type="box" size="{group.size} {group.size} {group.size}"'
    if group.kind is Kind.VASE:
        return f'<body name="{name}"><freejoint/><geom {cube} density="0.001"/></body>'
    if group.kind is Kind.BUTTON:
        return f'<body name="{name}" mocap="true"><geom type="sphere" size="{group.size}"/></body>'
    if group.kind is Kind.GREMLIN:
        return (
            f'<body name="{name}"><freejoint/><geom {cube} density="0.001"/></body>'
            f'<body name="{name}target" mocap="true"/>'
        )
    return ""
