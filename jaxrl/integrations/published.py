"""Names of the published systems and what they are called here: one table per system.

The hints after an unknown flag, the flags that are accepted under their published name, the conversion of published
configuration files (`--config params.yaml`) and docs/coming_from.md all read these tables.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from envs_jax.settings import short_repr
from jaxrl.common.errors import UsageError

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Name:
    """A published name."""

    theirs: str  # a flag without its dashes, or a key of a YAML file by the last parts of its path
    ours: str = ""  # the setting here; "" where there is none
    note: str = ""  # the conversion, or what to do where there is no setting
    # whether the same value always means the same here, so that the published name is accepted as a flag
    same: bool = False
    computed: bool = False  # whether `System.convert` computes the value; otherwise it is copied
    only: Any = None  # where there is no setting, the one value that is possible here
    algos: tuple[str, ...] = ()  # the algorithms that have this setting; () = all of the system

    @property
    def flag(self) -> str:
        return self.theirs.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class System:
    """A published system."""

    # name, url: what people call it, and where it is
    name: str
    url: str
    presets: Mapping[str, str]  # {algorithm here: the preset that says what a configuration file leaves out}
    # keys that identify the system: each of its configuration files has one of them, and no file of ours does
    marks: tuple[str, ...]
    names: tuple[Name, ...]
    # keys and sections that do not change training: the published code ignores them or they are for other programs
    unused: tuple[str, ...]
    # {`Name.theirs`: value in a file} -> algorithm here. Raises UsageError: the file is not for training.
    choose: Callable[[Values], str]
    # (algorithm, the same values) -> settings that are computed. Raises UsageError.
    convert: Callable[[str, Values], Values]


# ipp-marl


def _choose_ipp_marl(values: Values) -> str:
    kind = values.get("missions.type", "COMA")
    if kind != "COMA":
        raise UsageError(
            f"jaxrl trains missions of type COMA, not {short_repr(kind)}: to play scripted policies run python -m "
            "jaxrl.evaluate --env coverage --policy random,lawnmower,ig"
        )
    return "coma"


def _convert_ipp_marl(algo: str, values: Values) -> Values:
    """Return the number of missions per training step, and of all, and in which share of them exploration falls.

    A training step begins when batch_size x batch_number transitions are stored, and empties the memory; n_episodes
    times as many transitions are flown in all, in whole missions.
    """
    sizes = {"networks.batch_size": 600, "networks.batch_number": 5, "missions.n_agents": 4, "constraints.budget": 14}
    size, count, agents, budget = (_whole(name, values.get(name, default)) for name, default in sizes.items())
    settings: Values = {}
    transitions = size * count
    per_mission = agents * (budget + 1)
    if sizes.keys() & values.keys():
        settings |= {"minibatch_size": size, "num_envs": math.ceil(transitions / per_mission)}
    if "missions.n_episodes" in values:
        steps = _whole("missions.n_episodes", values["missions.n_episodes"])
        settings["total_episodes"] = max(1, steps * transitions // per_mission)
    if values.keys() & {"missions.n_episodes", "missions.eps_anneal_phase"}:
        phase = _whole("missions.eps_anneal_phase", values.get("missions.eps_anneal_phase", 10_000))
        settings["eps_anneal"] = phase / settings.get("total_episodes", _PRESET_MISSIONS[algo])
    if "uav.fix_range" in values:
        fixed = values["uav.fix_range"]
        settings["random_range"] = not fixed if isinstance(fixed, bool) else fixed
    if values.get("critic.target_update_mode") == "soft":
        settings["tau"] = values.get("critic.tau", 0.01)
    return settings


_PRESET_MISSIONS = {"coma": 75_000, "coma_original": 7_500}  # total_episodes of the presets
_MISSIONS = "batch_size x batch_number / (n_agents x (budget + 1))"
_ALTITUDES = "altitudes are 5, 10, 15 m"
_AREA = "the area is 50 m wide"
_CAMERA = "the camera sees 60 degrees"
IPP_MARL = System(
    name="ipp-marl",
    url="https://github.com/dmar-bonn/ipp-marl",
    presets={"coma": "coma_published", "coma_original": "coma_original"},
    marks=("missions.n_episodes", "missions.n_agents", "missions.eps_anneal_phase", "networks.batch_number"),
    names=(
        Name("missions.n_episodes", "total_episodes", "missions, not training steps: x num_envs", computed=True),
        Name("networks.batch_size", "minibatch_size", same=True, computed=True),
        Name("networks.batch_number", "num_envs", _MISSIONS, computed=True),
        Name("networks.data_passes", "num_epochs", same=True),
        Name("networks.copy_rate", "target_update_period", same=True),
        Name("networks.gamma", "gamma"),
        Name("networks.lambda", "td_lambda", same=True),
        Name("actor.learning_rate", "actor_lr"),
        Name("critic.learning_rate", "critic_lr"),
        Name("critic.target_update_mode", "tau", "hard: 0", computed=True),
        Name("critic.tau", "tau", computed=True),
        Name("missions.n_agents", "num_agents", same=True),
        Name("missions.eps_max", "eps_max"),
        Name("missions.eps_min", "eps_min"),
        Name("missions.eps_anneal_phase", "eps_anneal", "eps_anneal_phase / total_episodes", computed=True),
        Name("constraints.budget", "budget"),
        Name("constraints.num_actions", "num_actions"),
        Name("pixel.number_x", "q", same=True),
        Name("pixel.number_y", "q"),
        Name("uav.communication_range", "communication_range"),
        Name("uav.fix_range", "random_range", "the opposite: fix_range false is random_range true", computed=True),
        Name("uav.failure_rate", "failure_rate"),
        Name("mapping.prior", "prior"),
        Name("environment.seed", "seed"),
        Name("missions.type", note="only COMA trains; others: jaxrl.evaluate", only="COMA"),
        Name("missions.patience", note="runs have their full length"),
        Name("constraints.max_altitude", note=_ALTITUDES, only=15),
        Name("constraints.min_altitude", note=_ALTITUDES, only=5),
        Name("constraints.spacing", note="moves are of 5 m", only=5),
        Name("environment.x_dim", note=_AREA, only=50),
        Name("environment.y_dim", note=_AREA, only=50),
        Name("field_of_view.angle_x", note=_CAMERA, only=60),
        Name("field_of_view.angle_y", note=_CAMERA, only=60),
    ),
    unused=(
        "environment.num_envs", "sensor.type", "sensor.encoding", "sensor.model", "simulation.type",
        "simulation.cluster_radius", "experiment.title", "experiment.baselines", "uav.max_v", "uav.max_a",
        "uav.sampling_time", "missions.mission_mode", "missions.action_space", "missions.planning_uncertainty",
        "missions.use_eps", "missions.class_weighting", "missions.reward_normalization", "evaluation", "classification",
        "networks.type", "networks.device", "actor.hidden_dim", "actor.momentum", "actor.gradient_norm",
        "critic.update_mode", "critic.synchronization", "critic.fc1_dim", "critic.momentum", "critic.gradient_norm",
        "paths", "visualization",
    ),
    choose=_choose_ipp_marl,
    convert=_convert_ipp_marl,
)  # fmt: skip


# The snakes trainer


def _choose_snakes(values: Values) -> str:
    return "bicnet" if values.get("algo") == "bicnet" else "ddpg"


def _convert_snakes(_: str, values: Values) -> Values:
    """Return the game, and the opponent: a schedule of levels, and evasion from an episode on."""
    settings = {"env": str(values["game_name"])} if "game_name" in values else {}
    strategy = values.get("opponent_difficulty_strategy")
    if not values.get("enable_opponent_evasion"):
        return settings if strategy is None else settings | {"opponent": str(strategy)}
    begin = _whole("opponent_evasion_start_episode", values.get("opponent_evasion_start_episode", 40_000))
    share = begin / _whole("max_episodes", values.get("max_episodes", 50_000))
    opponent = "curriculum" if strategy is None else str(strategy)
    return settings | {"opponent": f"{opponent} evasion@{share:g}" if share <= 1 else opponent}


_EVASION = "'curriculum evasion@0.8': evasion from 80 % of training on"
_LOAD = "RUN --checkpoint N; --resume RUN continues exactly"
SNAKES = System(
    name="the snakes trainer",
    url="https://github.com/jidiai/Competition_3v3snakes",
    presets={"ddpg": "ddpg_competition", "bicnet": "bicnet"},
    marks=("a_lr", "c_lr"),
    names=(
        Name("max_episodes", "total_episodes", "of 201 environment steps with the reset", same=True),
        Name("a_lr", "actor_lr", same=True),
        Name("c_lr", "critic_lr", same=True),
        Name("epsilon", "eps_start", same=True),
        Name("epsilon_speed", "eps_decay", "per step of all num_envs games"),
        Name("batch_size", "batch_size"),
        Name("buffer_size", "buffer_size"),
        Name("update_interval", "update_interval"),
        Name("tau", "tau"),
        Name("gamma", "gamma"),
        Name("seed", "seed"),
        Name("episode_length", "max_steps"),
        Name("game_name", "env", computed=True),
        Name("opponent_difficulty_strategy", "opponent", "linear, exponential, curriculum", same=True, computed=True),
        Name("enable_opponent_evasion", "opponent", _EVASION, computed=True),
        Name("opponent_evasion_start_episode", "opponent", _EVASION, computed=True),
        Name("save_interval", "checkpoint_every", "in iterations: games x 201 / num_envs", computed=True),
        Name("load_model", "init_from", _LOAD, computed=True),
        Name("load_model_run", "init_from", _LOAD, computed=True),
        Name("load_model_run_episode", "init_from", _LOAD, computed=True),
        Name("model_episode", "init_from", _LOAD, computed=True),
        Name("log_dir", "runs", computed=True),
        Name("output_activation", note="softmax", only="softmax"),
        Name("local_rank", note="torchrun is found by itself"),
    ),
    unused=("algo",),
    choose=_choose_snakes,
    convert=_convert_snakes,
)


# The collective repository

_STAGES = {
    "train_worker": "sac",
    "distill_collective_transformer": "collective",
    "online_distill_collective_transformer": "collective",
    "train_student": "student",
}


def _choose_collective(values: Values) -> str:
    mode = str(values.get("mode", "train_worker"))
    if mode not in _STAGES:
        raise UsageError(
            f"the mode {short_repr(mode)} does not train: use python -m jaxrl.evaluate or jaxrl.collect with a run, or "
            f"one of the modes {', '.join(_STAGES)}"
        )
    return _STAGES[mode]


def _convert_collective(_: str, values: Values) -> Values:
    """Convert an interval from environment steps to iterations, which take one step in every environment."""
    if "save_freq" not in values:
        return {}
    envs = _whole("multitask.num_envs", values.get("multitask.num_envs", 1))
    return {"checkpoint_every": max(1, _whole("save_freq", values["save_freq"]) // envs)}


_WORKER = ("sac",)
_STUDENT = ("student",)
_COLLECTIVE = ("collective",)
COLLECTIVE = System(
    name="the collective repository",
    url="https://github.com/argator18/A-transformer-based-collective-learning-framework-for-scalable-knowledge-accumulation-and-transfer",
    presets={"sac": "sac_worker_original", "student": "student_original", "collective": "collective_original"},
    marks=("num_train_steps", "num_student_online_trainsteps2", "num_actor_train_step", "col_sampling_freq"),
    names=(
        Name("mode", "algo", "train_worker: sac; train_student: student", computed=True),
        Name("num_train_steps", "total_env_steps", same=True, algos=_WORKER),
        Name("num_student_online_trainsteps2", "total_env_steps", same=True, algos=_STUDENT),
        Name("init_steps", "random_steps", same=True, algos=_WORKER),
        Name("init_steps_stu2", "random_steps", same=True, algos=_STUDENT),
        Name("init_steps_online_tf", "random_steps", same=True, algos=_COLLECTIVE),
        Name("num_actor_train_step", "actor_updates", same=True, algos=_COLLECTIVE),
        Name("num_critic_train_step", "critic_updates", same=True, algos=_COLLECTIVE),
        Name("expert_train_step", "teacher_until_step", same=True, algos=_STUDENT),
        Name("constant_expert_weight", "teacher_constant_steps", same=True, algos=_STUDENT),
        Name("start_weight", "teacher_weight", same=True, algos=_STUDENT),
        Name("eval_freq", "eval_every", same=True),
        Name("save_freq", "checkpoint_every", "in iterations: steps / num_envs", computed=True),
        Name("num_eval_episodes", "eval_episodes", same=True),
        Name("model.retain_last_n", "keep_checkpoints"),
        Name("setup.seed", "seed"),
        Name("builder.discount", "gamma", same=True),
        Name("builder.critic_tau", "tau", same=True),
        Name("builder.actor_update_freq", "actor_update_period", same=True),
        Name("builder.critic_target_update_freq", "target_update_period", same=True),
        Name("builder.init_temperature", "initial_alpha", same=True),
        Name("optimizers.actor.lr", "actor_lr"),
        Name("optimizers.critic.lr", "critic_lr"),
        Name("optimizers.log_alpha.lr", "alpha_lr"),
        Name("replay_buffer.batch_size", "batch_size"),
        Name("replay_buffer.capacity", "buffer_size"),
        Name("multitask.num_envs", "num_envs"),
        Name("benchmark.env_name", note="only reach trains", only="reach-v2"),
        Name("early_stopping_threshold", note="runs have their full length"),
        Name("early_stopping_window", note="runs have their full length"),
        Name("save_dir", note="--runs"),
    ),
    unused=(
        "name", "builder", "verbose", "setup", "metrics", "col_sampling_freq", "col_training_samples",
        "col_training_warmup", "train_worker", "use_unscaled", "reset_goal_state", "num_recording_steps",
        "only_scripted_step", "scripted_porb", "init_record_step", "num_online_train_step", "follow_col_network",
        "stu_expert_steps", "actor_update_freq", "distill_scripted_policy", "init_steps_stu",
        "num_student_online_trainsteps", "use_scripted_mu", "evaluate_transformer", "evaluate_episodes",
        "evaluate_critic_rounds", "recording_eval_episodes", "latent_clustering_num", "col_eval_freq",
        "eval_latent_representation", "evaluate_unused", "should_resume", "save.buffer", "save_freq_transformer",
        "save_video", "save_video_freq", "envs_to_exclude_during_training", "distill_steps", "batch_size",
        "temperature", "distill_tasks", "distill_ds_steps",
    ),
    choose=_choose_collective,
    convert=_convert_collective,
)  # fmt: skip

SYSTEMS = (IPP_MARL, SNAKES, COLLECTIVE)


def _whole(name: str, value: Any) -> int:
    """Return a value of a file as a positive whole number. Raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12 or value != int(value):
        raise UsageError(f"{name} must be a positive whole number, not {short_repr(value)}")
    return int(value)


# Flags


def translate_flags(argv: Sequence[str], algo: str, known: Collection[str]) -> list[str]:
    """Return a command line in which published flags that mean the same here have our names.

    Only names of the system that `algo` replaces are accepted; `known` settings of ours keep their meaning.
    """
    accepted = {
        f"--{name.flag}": f"--{name.ours}"
        for system in SYSTEMS
        for name in system.names
        if name.same and algo in (name.algos or system.presets) and name.flag not in known
    }
    return [accepted.get(flag, flag) + equals + value for flag, equals, value in (word.partition("=") for word in argv)]


def hint(word: str, algo: str, prefix: str = "--") -> str | None:
    """Return a sentence about a published name that is not known here, None for any other word.

    `word` is a flag, or a name of a YAML file such as "experiment.num_train_steps"; `prefix` is of our names. Names of
    systems that `algo` does not replace must be complete, because their last parts may mean anything.
    """
    word = word.lstrip("-")
    for system in sorted(SYSTEMS, key=lambda system: algo not in system.presets):  # the algorithm's own comes first
        names = [name for name in system.names if _ends_with(word, name.theirs)]
        names = names or [name for name in system.names if name.flag == word and algo in system.presets]
        names = [name for name in names if algo in name.algos] or names
        if not names:
            continue
        if all(name.computed and word in name.note for name in names):  # one of several published values
            formulas = " or ".join(dict.fromkeys(f"{name.ours} = {name.note}" for name in names))
            return f"{word} of {system.name} has no setting of its own here: {formulas}"
        if settings := list(dict.fromkeys(f"{prefix}{name.ours}" for name in names if name.ours)):
            notes = "".join(f" ({note})" for note in dict.fromkeys(name.note for name in names) if note)
            return f"{word} of {system.name} is {' or '.join(settings)} here{notes}"
        return f"{word} of {system.name} has no setting here ({names[0].note})"
    return None


# Configuration files


@dataclasses.dataclass(frozen=True)
class Converted:
    """A published configuration file in our settings."""

    system: System
    algo: str  # here
    preset: str  # the preset that says what the file leaves out
    settings: Values  # the settings that the file changes
    left: list[str]  # a line for each setting that does not carry over


def convert(content: Mapping[str, Any], algo: str | None) -> Converted | None:
    """Convert the content of a configuration file of a published system; None for any other file.

    Its keys may lie in further sections, such as "overrides"; `algo` is the algorithm of the command line, if any.

    Raises UsageError: the file is not for training, or holds an impossible number.
    """
    if isinstance(content.get("env"), str):  # a file of ours
        return None
    paths = dict(_leaves(content))
    system = next((x for x in SYSTEMS if any(_ends_with(path, mark) for path in paths for mark in x.marks)), None)
    if system is None:
        return None
    entries = {path: next((x for x in system.names if _ends_with(path, x.theirs)), None) for path in paths}
    values = {entry.theirs: paths[path] for path, entry in entries.items() if entry}
    algo = algo if algo is not None and algo in system.presets else system.choose(values)
    settings = system.convert(algo, values)
    left: list[str] = []
    unknown: list[str] = []
    unused: list[str] = []
    for path, entry in entries.items():
        value = paths[path]
        if entry is None:
            (unused if any(f".{name}." in f".{path}." for name in system.unused) else unknown).append(path)
        elif entry.algos and algo not in entry.algos:
            unused.append(path)
        elif entry.ours and not entry.computed:
            if settings.setdefault(entry.ours, value) != value:
                left.append(f"{path} {short_repr(value)}: {entry.ours} is {short_repr(settings[entry.ours])} already")
        elif not entry.ours and value != entry.only:
            left.append(f"{path} {short_repr(value)}: {entry.note}")
        elif entry.computed and entry.ours in ("init_from", "runs") and value:
            left.append(f"{path} {short_repr(value)}: use --{entry.ours}")
    left += [f"{part}: there is nothing like it here" for part in _sections(unknown, paths)]
    if unused:
        left.append(f"{', '.join(unused)}: without effect on this training")
    return Converted(system, algo, system.presets[algo], settings, left)


def _leaves(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _ends_with(path: str, name: str) -> bool:
    return f".{path}".endswith(f".{name}")


def _sections(unknown: Sequence[str], paths: Mapping[str, Any]) -> list[str]:
    """Return unknown keys with their values, whole unknown sections as one."""
    known = [path for path in paths if path not in unknown]
    sections: dict[str, None] = {}
    for path in unknown:
        prefixes = list(itertools.accumulate(path.split("."), lambda head, part: f"{head}.{part}"))
        section = next(x for x in prefixes if x == path or not any(y.startswith(f"{x}.") for y in known))
        sections[f"{path} {short_repr(paths[path])}" if section == path else section] = None
    return list(sections)
