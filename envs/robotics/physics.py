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
HEIGHTS = {
    Kind.VASE: 0.1 - 4e-5,
    Kind.PILLAR: 0.5,
    Kind.BOX: 0.2,
    Kind.BUTTON: 0.1,
    Kind.GREMLIN: 0.1,
}
"""Height in metres at which a body of each kind starts; vases sink into the soft floor a little."""
AGENT_HEIGHT = 0.1
"""Height in metres of the agent's centre."""
GOAL_HEIGHT = 0.16
"""Height in metres of the centre of a goal that a box is pushed to."""
FREE = (Kind.VASE, Kind.BOX, Kind.GREMLIN)
"""Kinds that move by physics."""
FIXED = (Kind.PILLAR, Kind.BUTTON)
"""Kinds that collide but never move. They are mocap bodies, as each layout puts them elsewhere."""
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


def model_xml(task: Task) -> str:
    """Write the model of a task as MuJoCo's XML; a body is named by its kind and a number.

    State: qpos holds the agent's (x, y, heading), then position and quaternion of each object that
    moves by physics; mocap bodies are the fixed objects, then the gremlins' targets. Sensors: the
    12 observed numbers, then one count of contacts with the agent per object of a kind in
    `task.felt`, in the task's order.
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
            if group.kind in task.felt:
                contacts.append(f'<contact body1="agent" body2="{name}" data="found"/>')
    return _WORLD.format(
        timestep=TIMESTEP,
        bodies="\n".join(bodies),
        welds="\n".join(welds),
        contacts="\n".join(contacts),
    )


def build_model(task: Task) -> mujoco.MjModel:
    """Compile the model of a task, see `model_xml`."""
    model = mujoco.MjModel.from_xml_string(model_xml(task))
    for i in range(model.nbody):
        if model.body(i).name.startswith("gremlin") and model.body_dofnum[i]:
            # MuJoCo 2.3.3, which the tasks were tuned on, scaled all six rows of a weld by the
            # translational inverse weight. With the rotational one, 150 times larger, a gremlin
            # that is bumped starts to spin.
            model.body_invweight0[i, 1] = model.body_invweight0[i, 0]
    return model


def _body(group: Objects, name: str) -> str:
    size = group.size
    cube = f'type="box" size="{size} {size} {size}"'
    if group.kind in FREE:
        geoms = f'<geom {cube} density="0.001"/>'
        if group.kind is Kind.BOX:
            block = f'type="box" size="{size / 2} {size / 2} {size}" density="0.001"'
            corners = ((size, size), (-size, size), (size, -size), (-size, -size))
            geoms += "".join(f'<geom {block} pos="{x} {y} 0"/>' for x, y in corners)
        body = f'<body name="{name}"><freejoint/>{geoms}</body>'
        if group.kind is Kind.GREMLIN:
            body += f'<body name="{name}target" mocap="true"/>'
        return body
    if group.kind in FIXED:
        shape = f'type="sphere" size="{size}"'
        if group.kind is Kind.PILLAR:
            shape = f'type="cylinder" size="{size} {HEIGHTS[Kind.PILLAR]}"'
        return f'<body name="{name}" mocap="true"><geom {shape}/></body>'
    return ""
