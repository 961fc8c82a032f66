"""The real package's side of the comparison; runs in the environment that `make parity-env` builds.

    python -m tests.parity.real_side '{"kind": "resets", "task": "Goal1", ...}' OUTPUT.npz

Each kind of job is one function; what it returns goes into the file, without pickle. Navigation
states are written in the format of the native `state_dict`: the agent in the world's frame, and
objects in the order of the layout.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np

from pbcrl_envs import upstream
from tests.parity import policies

CONTACTS = ("floor", "sphere", "cylinder", "box")
"""Contacts of a step, by the worst pair of shapes that touched; the engines differ ever more."""
PLANE, SPHERE, CYLINDER, BOX = 0, 2, 5, 6
"""MuJoCo's numbers of the shapes."""
FREE_JOINT = 0

ROBOT_FIELDS = """
qpos0 qpos_spring body_parentid body_pos body_quat body_ipos body_iquat body_mass body_inertia
body_invweight0 jnt_type jnt_pos jnt_axis jnt_stiffness jnt_limited jnt_range jnt_margin jnt_solref
jnt_solimp dof_armature dof_damping dof_frictionloss dof_invweight0 geom_bodyid geom_type geom_size
geom_pos geom_quat geom_contype geom_conaffinity geom_condim geom_priority geom_friction geom_margin
geom_gap geom_solref geom_solimp geom_solmix tendon_limited tendon_range tendon_stiffness
tendon_damping actuator_trntype actuator_trnid actuator_gear actuator_ctrllimited
actuator_ctrlrange actuator_forcerange actuator_gainprm actuator_biasprm
"""
ROBOT_OPTIONS = """
timestep gravity wind density viscosity impratio tolerance iterations integrator cone solver
disableflags enableflags
"""
"""What a robot's motion depends on in `MjModel` and in its options."""


def env_id(task):
    return f"Safety{task}-v1" if task.endswith("Velocity") else f"SafetyPoint{task}-v0"


def play(env, policy, *, seed):
    """One episode: its return, cost and length."""
    obs, _ = env.reset(seed=seed)
    totals, steps, over = np.zeros(2), 0, False
    while not over:
        obs, reward, terminated, truncated, info = env.step(policy(obs[None], steps)[0])
        totals += reward, info["cost"]
        steps += 1
        over = terminated or truncated
    return *totals, steps


def episodes(*, task, policy, horizon, seeds):
    """Whole episodes of a fixed policy, one per seed."""
    env = upstream.make(env_id(task), max_episode_steps=horizon)
    played = [play(env, policies.POLICIES[policy], seed=seed) for seed in range(*seeds)]
    returns, costs, lengths = np.array(played).T
    return {"returns": returns, "costs": costs, "lengths": lengths}


def layouts(*, task, seeds, resets):
    """Layouts and goals of `resets` resets per seed, with seven steps between two of them."""
    env = upstream.make(env_id(task))
    found = []
    for seed in range(*seeds):
        for number in range(resets):
            env.reset(seed=None if number else seed)
            found.append(layout(env.unwrapped.task))
            for _ in range(7):
                env.step(np.zeros(2))
    return stacked(found)


def first_observations(*, task, seeds, resets):
    """Observations of `resets` resets per seed, with a step in between."""
    env = upstream.make(env_id(task))
    found = []
    for seed in range(*seeds):
        for number in range(resets):
            obs, _ = env.reset(seed=None if number else seed)
            found.append(obs)
            env.step(np.zeros(env.action_space.shape))
    return {"obs": np.array(found)}


def navigation_steps(*, task, policy, seeds, steps):
    """Everything before and after each step, for one-step comparisons: `before_*` and `after_*`."""
    env = upstream.make(env_id(task))
    task_object, contacts = env.unwrapped.task, ContactRecorder()
    rows = []
    for seed in range(*seeds):
        obs, _ = env.reset(seed=seed)
        initial = pose(task_object)
        for step in range(steps):
            action = policies.POLICIES[policy](obs[None], step)[0]
            before = state(task_object, initial, elapsed=step)
            contacts.clear()
            obs, reward, terminated, _, info = env.step(action)
            contacts.add(task_object.model, task_object.data)
            after = state(task_object, initial, elapsed=step + 1)
            rows.append(
                {
                    "action": action,
                    "obs": obs,
                    "reward": reward,
                    "cost": info["cost"],
                    "goal_met": info.get("goal_met", False),
                    "terminated": terminated,
                    "contact": contacts.worst,
                    **{f"before_{key}": value for key, value in before.items()},
                    **{f"after_{key}": value for key, value in after.items()},
                }
            )
            if terminated:
                break
    return stacked(rows)


def velocity_steps(*, task, policy, seeds, steps):
    """Likewise for a velocity task."""
    env = upstream.make(env_id(task))
    rows = []
    for seed in range(*seeds):
        obs, _ = env.reset(seed=seed)
        for step in range(steps):
            action = policies.POLICIES[policy](obs[None], step)[0]
            before = robot_state(env.unwrapped)
            obs, reward, terminated, _, info = env.step(action)
            rows.append(
                {
                    "action": action,
                    "obs": obs,
                    "reward": reward,
                    "cost": info["cost"],
                    "terminated": terminated,
                    **{f"before_{key}": value for key, value in before.items()},
                    **{f"after_{key}": value for key, value in robot_state(env.unwrapped).items()},
                }
            )
            if terminated:
                break
    return stacked(rows)


def models(*, task, seeds):
    """The model that the package compiles for each layout, as XML, and what stands where."""
    env = upstream.make(env_id(task))
    found = []
    for seed in range(*seeds):
        env.reset(seed=seed)
        task_object = env.unwrapped.task
        xml = task_object.world.xml_string
        found.append({"xml": xml, "names": names(task_object), **layout(task_object)})
    return stacked(found)


def robot_numbers(*, task):
    """The numbers of the model that the package compiles for a robot, by their names in MuJoCo."""
    model = upstream.make(env_id(task)).unwrapped.model
    options = {f"opt.{name}": getattr(model.opt, name) for name in ROBOT_OPTIONS.split()}
    return {**{name: getattr(model, name) for name in ROBOT_FIELDS.split()}, **options}


def skies(*, task, steps):
    """Observations, rewards and costs with the package's own sky and without it, (2, ...)."""
    import yaml

    env = upstream.make(env_id(task))
    world = sys.modules["safety_gymnasium.world"]
    without = world.yaml
    found = []
    for loader in (yaml, without):
        world.yaml = loader
        obs, _ = env.reset(seed=3)
        rows = [(*obs, 0.0, 0.0)]
        for step in range(steps):
            obs, reward, _, _, info = env.step(policies.bump(obs[None], step)[0])
            rows.append((*obs, reward, info["cost"]))
        found.append(rows)
    return {"rows": np.array(found)}


def refusals():
    """What is said to those who ask for what there is not, by name."""
    import gymnasium

    import pbcrl
    import pbcrl_envs

    vector_env = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    asked = {
        "unknown id": lambda: upstream.make("SafetyPointGaol1-v0"),
        "vector wrapper": lambda: pbcrl.PreferenceCostVectorWrapper(
            vector_env,
            pbcrl.CostModel(vector_env.single_observation_space, vector_env.single_action_space),
        ),
        "vector check": lambda: pbcrl_envs.check_cost_vector_env(vector_env),
    }
    said = {}
    for name, ask in asked.items():
        try:
            ask()
        except (ImportError, ValueError) as error:
            said[name] = np.array(str(error))
    return said


def learning(*, task, max_steps):
    """What `pbcrl` makes of the real package under its old Gymnasium, as numbers to look at."""
    import torch

    import pbcrl
    import pbcrl_envs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    bare = upstream.make(env_id(task), max_episode_steps=max_steps)
    pbcrl_envs.check_cost_env(bare)
    cost_model = pbcrl.CostModel(
        bare.observation_space,
        bare.action_space,
        hidden_sizes=(32,),
        output_scale=max_steps**-0.5,
    )
    env = pbcrl.PreferenceCostWrapper(bare, cost_model)
    played, true = [], []
    for seed in range(24):
        env.reset(seed=seed)
        total, found, speed = 0.0, [], rng.uniform(-1, 1)
        while not found:
            *_, info = env.step(np.clip(rng.normal(speed, 0.5, bare.action_space.shape), -1, 1))
            total += info["true_cost"]
            found = pbcrl.finished_trajectories(info)
        played += found
        true.append(total)
    limit = float(np.median(true))
    oracle = pbcrl.SyntheticOracle(limit)
    buffer = pbcrl.PreferenceBuffer()
    buffer.add_trajectories(played)
    pairs = pbcrl.draw_pairs(len(played), 100, rng=rng)
    buffer.add_labels(pairs, oracle.label(buffer.queries(pairs)))
    pbcrl.CostModelTrainer(cost_model, rng=rng).finetune(buffer, num_new=len(pairs))
    return {
        "true_costs": np.array(true),
        "recorded_costs": np.array([trajectory.true_cost for trajectory in played]),
        "learned_costs": cost_model.score(played),
        "limit": limit,
    }


def keep_episodes(env, played):
    """Return a wrapped env whose finished episodes are put into `played`, too."""
    import gymnasium

    import pbcrl

    class Keep(gymnasium.Wrapper):
        def step(self, action):
            *others, info = self.env.step(action)
            played.extend(pbcrl.finished_trajectories(info))
            return *others, info

    return Keep(env)


def omnisafe(*, task, max_steps, epochs):
    """OmniSafe's PPOLag under a learned cost, by its own log and by the episodes it played."""
    import csv
    import tempfile
    from pathlib import Path

    import gymnasium
    import torch

    import pbcrl
    from pbcrl.errors import MissingCostError
    from tests.benchmarks.omnisafe_rates import import_omnisafe

    library = import_omnisafe(env_id(task), sky=False)
    from pbcrl.adapters.omnisafe import register_env

    torch.set_num_threads(1)
    torch.manual_seed(0)
    played = []

    def make_env():
        bare = upstream.make(env_id(task), max_episode_steps=max_steps)
        return keep_episodes(pbcrl.PreferenceCostWrapper(bare, cost_model), played)

    bare = upstream.make(env_id(task), max_episode_steps=max_steps)
    cost_model = pbcrl.CostModel.for_env(bare)
    torch.nn.init.normal_(cost_model.net[-1].weight)
    torch.nn.init.constant_(cost_model.net[-1].bias, 30.0)  # every episode is above the limit

    def train(name, *, num_envs=1):
        with tempfile.TemporaryDirectory() as folder:
            config = {
                "seed": 0,
                "train_cfgs": {
                    "total_steps": 4 * max_steps * epochs,
                    "vector_env_nums": num_envs,
                    "torch_threads": 1,
                },
                "algo_cfgs": {"steps_per_epoch": 4 * max_steps, "update_iters": 2},
                "lagrange_cfgs": {"cost_limit": cost_model.learned_limit},
                "logger_cfgs": {"use_wandb": False, "use_tensorboard": False, "log_dir": folder},
            }
            library.Agent("PPOLag", name, custom_cfgs=config).learn()
            (path,) = Path(folder).glob("**/progress.csv")
            with path.open(newline="") as file:
                return list(csv.DictReader(file))

    register_env("Learned-v0", make_env)
    rows = train("Learned-v0")
    register_env("No-cost-v0", lambda: gymnasium.make("Pendulum-v1"))
    register_env("Discrete-v0", lambda: gymnasium.make("CartPole-v1"))
    said = []
    for ask in (
        lambda: register_env("Learned-v0", make_env),
        lambda: train("Learned-v0", num_envs=2),
        lambda: train("No-cost-v0"),
        lambda: train("Discrete-v0"),
    ):
        try:
            ask()
        except (ValueError, MissingCostError) as error:
            said.append(str(error))
    columns = "Metrics/EpCost", "Metrics/LagrangeMultiplier"
    logged = {name: np.array([float(row[name]) for row in rows]) for name in columns}
    return {
        "logged_costs": logged["Metrics/EpCost"],
        "multipliers": logged["Metrics/LagrangeMultiplier"],
        "learned_costs": cost_model.score(played),
        "true_costs": np.array([trajectory.true_cost for trajectory in played]),
        "limit": cost_model.learned_limit,
        "said": np.array(said),
    }


def fsrl(*, max_steps, epochs):
    """FSRL's PPO-Lag under a learned cost, by its own count and by the episodes it played."""
    import gymnasium
    import torch

    import pbcrl
    from tests.benchmarks.omnisafe_rates import import_without

    reader = "tensorboard.backend.event_processing.event_accumulator"
    parents = ["tensorboard", "tensorboard.backend", "tensorboard.backend.event_processing"]
    unused = [*parents, reader, "torch.utils.tensorboard", "wandb"]
    agents = import_without(unused, "fsrl.agent")
    from tianshou.env import DummyVectorEnv

    torch.set_num_threads(1)
    torch.manual_seed(0)
    played = []

    def make_env():
        bare = gymnasium.make("Pendulum-v1", max_episode_steps=max_steps)  # has no cost
        return keep_episodes(pbcrl.PreferenceCostWrapper(bare, cost_model), played)

    bare = gymnasium.make("Pendulum-v1", max_episode_steps=max_steps)
    cost_model = pbcrl.CostModel.for_env(bare)
    torch.nn.init.normal_(cost_model.net[-1].weight)
    torch.nn.init.constant_(cost_model.net[-1].bias, 30.0)  # every episode is above the limit
    limit = cost_model.learned_limit
    agent = agents.PPOLagAgent(make_env(), cost_limit=limit, hidden_sizes=(16,), thread=1)
    _, logged, _ = agent.learn(
        DummyVectorEnv([make_env, make_env]),
        epoch=epochs,
        episode_per_collect=2,
        step_per_epoch=2 * max_steps,
        repeat_per_collect=1,
        batch_size=max_steps,
        save_ckpt=False,
        verbose=False,
        show_progress=False,
    )
    return {
        "logged_cost": logged["update/cum_cost"],
        "learned_costs": cost_model.score(played),
        "price": logged["loss/lagrangian"],
    }


# -- States ----------------------------------------------------------------------------------


def names(task):
    """The agent and the objects in the order in which they are placed."""
    return list(task.placements_conf.placements)


def body(data, name):
    return data.body(name + "obj" if name.startswith("gremlin") else name)


def layout(task):
    config = task.world_info.world_config_dict
    parts = {**config["geoms"], **config["free_geoms"]}
    headings = [config["agent_rot"]]
    for name in names(task)[1:]:
        headings.append(parts[name + "obj" if name.startswith("gremlin") else name]["rot"])
    found = {
        "positions": np.array([task.world_info.layout[name] for name in names(task)]),
        "headings": np.array(headings),
    }
    if "buttons" in task._geoms:
        found["positions"][names(task).index("goal")] = task.goal.pos[:2]
        found["goal_button"] = task.buttons.goal_button
    return found


def pose(task):
    """The agent's initial place and heading, from which its joints count."""
    model = task.model
    place, (w, _, _, z) = model.body("agent").pos[:2].copy(), model.body("agent").quat
    return place, 2 * np.arctan2(z, w)


def turned(vector, angle):
    x, y = vector
    return np.array([x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)])


def physics(model, data, names, initial, spawn):
    """The physics of the native `state_dict`, from the state of a model of the package.

    `initial` is the agent's first place and heading, `spawn` those of each gremlin.
    """
    place, heading = initial
    free = [name for name in names if name.startswith(("vase", "push_box", "gremlin"))]
    fixed = [name for name in names if name.startswith(("pillar", "button"))]
    qpos = [place + turned(data.qpos[:2], heading), [heading + data.qpos[2]]]
    velocities = {}
    for key in ("qvel", "qacc_warmstart"):
        source = getattr(data, key)
        velocities[key] = [turned(source[:2], heading), source[2:3]]
    for name in free:
        joint = model.body_jntadr[body(data, name).id]
        start, first = model.jnt_qposadr[joint], model.jnt_dofadr[joint]
        qpos.append(data.qpos[start : start + 7])
        for key, values in velocities.items():
            values.append(getattr(data, key)[first : first + 6])
    # The native targets have the weld's relative pose, which is the gremlin's first one, in them.
    targets = [
        np.append(place, 0.1) + data.mocap_pos[model.body(name + "mocap").mocapid[0]]
        for name, (place, _) in spawn.items()
    ]
    turns = [[np.cos(angle / 2), 0, 0, np.sin(angle / 2)] for _, angle in spawn.values()]
    return {
        "time": data.time,
        "qpos": np.concatenate(qpos),
        **{key: np.concatenate(values) for key, values in velocities.items()},
        "ctrl": data.ctrl.copy(),
        "mocap_pos": np.array([body(data, n).xpos for n in fixed] + targets).reshape(-1, 3),
        "mocap_quat": np.array([body(data, n).xquat for n in fixed] + turns).reshape(-1, 4),
    }


def state(task, initial, *, elapsed):
    """What `state_dict` of the native task returns, `task`, `finished` and `cut` aside."""
    objects = task.world_info.world_config_dict["free_geoms"]
    spawn = {
        name: (task.world_info.reset_layout[name], objects[name + "obj"]["rot"])
        for name in names(task)
        if name.startswith("gremlin")
    }
    _, words, position, *_ = task.random_generator.random_generator.get_state()
    has_buttons = "buttons" in task._geoms
    return {
        **physics(task.model, task.data, names(task), initial, spawn),
        "positions": np.array([body(task.data, name).xpos[:2] for name in names(task)]),
        "gremlin_spawn": np.array([place for place, _ in spawn.values()]).reshape(-1, 2),
        "goal_button": task.buttons.goal_button if has_buttons else 0,
        "button_timer": task.buttons.timer if has_buttons else 0,
        "stream_words": words,
        "stream_position": position,
        "elapsed": elapsed,
    }


def robot_state(robot):
    data = robot.data
    location = data.qpos[:1]
    if robot.model.jnt_type[0] == FREE_JOINT:
        mass = robot.model.body_mass
        location = (mass @ data.xipos[:, :2]) / mass.sum()
    return {
        "time": data.time,
        "qpos": data.qpos.copy(),
        "qvel": data.qvel.copy(),
        "qacc_warmstart": data.qacc_warmstart.copy(),
        "location": location.copy(),
    }


def worst_contact(model, data):
    """The worst contact at present, as an index of CONTACTS."""
    worst = 0
    for contact in data.contact[: data.ncon]:
        pair = {int(model.geom_type[geom]) for geom in (contact.geom1, contact.geom2)}
        if PLANE in pair:
            continue
        # A sphere touches a sphere or a box in one point, which both engines compute alike.
        exact = SPHERE in pair and CYLINDER not in pair
        worst = max(worst, 1 if exact else 2 if CYLINDER in pair else 3)
    return worst


class ContactRecorder:
    """Notes the worst contact over all physics steps that the package takes."""

    def __init__(self):
        from safety_gymnasium.bases import underlying

        engine = underlying.mujoco
        self.worst = 0

        def step(model, data):
            engine.mj_step(model, data)
            self.add(model, data)

        underlying.mujoco = SimpleNamespace(**{**vars(engine), "mj_step": step})

    def clear(self):
        self.worst = 0

    def add(self, model, data):
        self.worst = max(self.worst, worst_contact(model, data))


def stacked(rows):
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    np.savez(sys.argv[2], **globals()[job.pop("kind")](**job))
