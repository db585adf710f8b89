"""Names of the published systems and what they are called here: one table per system.

The hints after an unknown flag, the flags that are accepted under their published name, and docs/coming_from.md all
read these tables.
"""

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True)
class Name:
    """A published name.

    Attributes:
        theirs: a flag without its dashes, or a key of a YAML file by the last parts of its path.
        ours: the setting here; "" where there is none.
        note: the conversion, or what to do where there is no setting.
        same: the same value means the same here whatever else is set: as a flag, the published name is accepted.
        algos: the algorithms for which it counts; () = all of the system.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    same: bool = False
    algos: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """Return the last part of the name."""
        return self.theirs.rpartition(".")[2]


@dataclasses.dataclass(frozen=True)
class System:
    """A published system.

    Attributes:
        name: what people call it.
        algos: that replace it here.
        names: the table.
    """

    name: str
    algos: tuple[str, ...]
    names: tuple[Name, ...]


# ipp-marl


_MISSIONS = "batch_size x batch_number / (n_agents x (budget + 1))"
_ALTITUDES, _AREA, _CAMERA = "altitudes are 5, 10, 15 m", "the area is 50 m wide", "the camera sees 60 degrees"
IPP_MARL = System(
    name="ipp-marl",
    algos=("coma", "coma_original"),
    names=(
        Name("missions.n_episodes", "total_episodes", "missions, not training steps: x num_envs"),
        Name("networks.batch_size", "minibatch_size", same=True),
        Name("networks.batch_number", "num_envs", _MISSIONS),
        Name("networks.data_passes", "num_epochs", same=True),
        Name("networks.copy_rate", "target_update_period", same=True),
        Name("networks.gamma", "gamma"),
        Name("networks.lambda", "td_lambda", same=True),
        Name("actor.learning_rate", "actor_lr"),
        Name("critic.learning_rate", "critic_lr"),
        Name("critic.target_update_mode", "tau", "hard: 0"),
        Name("critic.tau", "tau"),
        Name("missions.n_agents", "num_agents", same=True),
        Name("missions.eps_max", "eps_max"),
        Name("missions.eps_min", "eps_min"),
        Name("missions.eps_anneal_phase", "eps_anneal", same=True),
        Name("constraints.budget", "budget"),
        Name("constraints.num_actions", "num_actions"),
        Name("pixel.number_x", "q", same=True),
        Name("pixel.number_y", "q"),
        Name("uav.communication_range", "communication_range"),
        Name("uav.fix_range", "fix_range"),
        Name("uav.failure_rate", "failure_rate"),
        Name("mapping.prior", "prior"),
        Name("environment.seed", "seed"),
        Name("missions.type", note="only COMA trains; others: jaxrl.evaluate"),
        Name("missions.patience", note="runs have their full length"),
        Name("constraints.max_altitude", note=_ALTITUDES),
        Name("constraints.min_altitude", note=_ALTITUDES),
        Name("constraints.spacing", note="moves are of 5 m"),
        Name("environment.x_dim", note=_AREA),
        Name("environment.y_dim", note=_AREA),
        Name("field_of_view.angle_x", note=_CAMERA),
        Name("field_of_view.angle_y", note=_CAMERA),
    ),
)  # fmt: skip


# The snakes trainer


_EVASION = "'curriculum evasion@0.8': evasion from 80 % of training on"
_LOAD = "RUN --checkpoint N; --resume RUN continues exactly"
SNAKES = System(
    name="the snakes trainer",
    algos=("ddpg", "bicnet"),
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
        Name("game_name", "env"),
        Name("opponent_difficulty_strategy", "opponent", "linear, exponential, curriculum", same=True),
        Name("enable_opponent_evasion", "opponent", _EVASION),
        Name("opponent_evasion_start_episode", "opponent", _EVASION),
        Name("save_interval", "checkpoint_every", "in iterations: games x 201 / num_envs"),
        Name("load_model", "init_from", _LOAD),
        Name("load_model_run", "init_from", _LOAD),
        Name("load_model_run_episode", "init_from", _LOAD),
        Name("model_episode", "init_from", _LOAD),
        Name("log_dir", "runs"),
        Name("output_activation", note="softmax"),
        Name("local_rank", note="torchrun is found by itself"),
    ),
)


# The collective repository

_WORKER, _STUDENT, _COLLECTIVE = ("sac",), ("student",), ("collective",)
_STEPS = "in iterations: steps / num_envs"
COLLECTIVE = System(
    name="the collective repository",
    algos=("sac", "student", "collective"),
    names=(
        Name("mode", "algo", "train_worker: sac; train_student: student"),
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
        Name("eval_freq", "eval_every", _STEPS),
        Name("save_freq", "checkpoint_every", _STEPS),
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
        Name("benchmark.env_name", note="only reach trains"),
        Name("early_stopping_threshold", note="runs have their full length"),
        Name("early_stopping_window", note="runs have their full length"),
        Name("save_dir", note="--runs"),
    ),
)  # fmt: skip

SYSTEMS = (IPP_MARL, SNAKES, COLLECTIVE)


# Flags


def systems_for(algo: str) -> list[System]:
    """Return all systems, the one that an algorithm replaces first."""
    return sorted(SYSTEMS, key=lambda system: algo not in system.algos)


def translate_flags(argv: Sequence[str], algo: str, known: Collection[str]) -> list[str]:
    """Return a command line with our names of the flags whose published names mean the same.

    Args:
        argv: the words.
        algo: what is trained: only the names of the system that it replaces are accepted.
        known: our settings, whose names keep their meaning.
    """
    accepted = {
        f"--{name.flag}": f"--{name.ours}"
        for system in SYSTEMS
        for name in system.names
        if name.same and algo in (name.algos or system.algos) and name.flag not in known
    }
    return [accepted.get(flag, flag) + equals + value for flag, equals, value in (word.partition("=") for word in argv)]


def hint(word: str, algo: str, prefix: str = "--") -> str | None:
    """Return a sentence about a published name that is not known here, None for any other word.

    Args:
        word: a flag, or a name of a YAML file such as "experiment.num_train_steps".
        algo: what is trained. Names of systems without it must be complete: a last part may mean anything.
        prefix: of our names.
    """
    word = word.lstrip("-")
    for system in systems_for(algo):
        names = [name for name in system.names if f".{word}".endswith(f".{name.theirs}")]
        names = names or [name for name in system.names if name.flag == word and algo in system.algos]
        names = [name for name in names if algo in name.algos] or names
        if not names:
            continue
        if all(word in name.note for name in names):  # of several published values
            formulas = " or ".join(dict.fromkeys(f"{name.ours} = {name.note}" for name in names))
            return f"{word} of {system.name} has no setting of its own here: {formulas}"
        if settings := list(dict.fromkeys(f"{prefix}{name.ours}" for name in names if name.ours)):
            notes = "".join(f" ({note})" for note in dict.fromkeys(name.note for name in names) if note)
            return f"{word} of {system.name} is {' or '.join(settings)} here{notes}"
        return f"{word} of {system.name} has no setting here ({names[0].note})"
    return None
