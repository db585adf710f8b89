"""Specs, the time step, the environment protocol, and the registry of names.

Layout letters used everywhere: T time, B batch of environments, A agents. An author writes ONE copy of the
environment as pure functions (no batch axis, no auto-reset); `envs_jax.batch` batches them.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.matches import MatchRules
from envs_jax.progress import Progress
from envs_jax.settings import ADAPTERS as ADAPTERS
from envs_jax.settings import LARGEST as LARGEST
from envs_jax.settings import MOST_COMPARED, registry
from envs_jax.settings import SMALLEST_IMAGE as SMALLEST_IMAGE
from envs_jax.settings import Bounds as Bounds
from envs_jax.settings import check_bounds as check_bounds
from envs_jax.settings import check_settings as check_settings
from envs_jax.settings import closest as closest
from envs_jax.settings import exact_settings as exact_settings
from envs_jax.settings import format_bound as format_bound
from envs_jax.settings import is_decorated as is_decorated
from envs_jax.settings import load as load
from envs_jax.settings import load_module as load_module
from envs_jax.settings import register as register
from envs_jax.settings import registered as registered
from envs_jax.settings import setting as setting
from envs_jax.settings import short_repr as short_repr
from envs_jax.settings import take_exactly as take_exactly
from envs_jax.settings import with_default as with_default

T = TypeVar("T")
Array = jax.Array
Reduction = Literal["last", "sum", "max", "any"]


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make a frozen dataclass of a class and register it as a pytree; every field is a child."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@dataclasses.dataclass(frozen=True)
class Discrete:
    """Integers 0 .. n - 1."""

    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> Any:
        return jnp.int32

    def sample(self, key: Array) -> Array:
        """Draw an integer, int32[]."""
        return jax.random.randint(key, (), 0, self.n, jnp.int32)

    def contains(self, x: Any) -> Array:
        """Return whether a value lies in the space, bool[]."""
        return (jnp.asarray(x) >= 0) & (jnp.asarray(x) < self.n)


@dataclasses.dataclass(frozen=True)
class Box:
    """Arrays of one shape and dtype whose values lie in [low, high].

    Attributes:
        shape: of the array.
        dtype: of its numbers.
        low, high: one number for all, or an array that broadcasts to the shape, a bound for each number. Where these
            differ they are kept as nested tuples of the shape, so that boxes can be hashed; see `bounds`.

    Raises:
        ValueError: a number as dtype, or bounds that are no numbers or do not fit the shape.
    """

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    low: Any = -math.inf
    high: Any = math.inf

    def __post_init__(self) -> None:
        if isinstance(self.dtype, int | float):
            raise ValueError(f"a box's second argument is its dtype, not {self.dtype}: use low=... and high=...")
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        for name in ("low", "high"):
            object.__setattr__(self, name, _bound(name, getattr(self, name), self.shape))

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds of each number, float64[*shape]."""
        low, high = (np.broadcast_to(np.asarray(bound, np.float64), self.shape) for bound in (self.low, self.high))
        return low, high

    @property
    def lowest(self) -> float:
        return self.low if isinstance(self.low, int | float) else float(np.min(self.low))

    @property
    def highest(self) -> float:
        return self.high if isinstance(self.high, int | float) else float(np.max(self.high))

    def sample(self, key: Array) -> Array:
        """Draw an array, uniform between the bounds; standard normal, cut at the bounds, where one is infinite."""
        low, high = (bound.astype(np.float32) for bound in self.bounds)
        whole = jnp.issubdtype(self.dtype, jnp.integer)  # the highest integer as likely as the others
        finite = np.isfinite(high - low)
        drawn = jax.random.normal(key, self.shape, jnp.float32)
        drawn = jnp.clip(drawn, low, high)
        if finite.any():
            ends = np.where(finite, low, 0), np.where(finite, high + np.float32(whole), 1)
            drawn = jnp.where(finite, jax.random.uniform(key, self.shape, jnp.float32, *ends), drawn)
        return (jnp.floor(drawn) if whole else drawn).astype(self.dtype)

    def contains(self, x: Any) -> Array:
        """Return whether all values lie between the bounds, bool[]."""
        low, high = (np.array(bound) if isinstance(bound, tuple) else bound for bound in (self.low, self.high))
        return jnp.all((jnp.asarray(x) >= low) & (jnp.asarray(x) <= high))


def _bound(name: str, value: Any, shape: tuple[int, ...]) -> Any:
    """Return a bound of a box as a Python number, or where its numbers differ as nested tuples."""
    if isinstance(value, int | float):  # also of NumPy's float64
        return value if type(value) in (int, float) else float(value)
    try:
        numbers = np.asarray(value)
        bounds = np.broadcast_to(numbers, numbers.shape if numbers.ndim == 0 else shape)
    except ValueError:
        raise ValueError(f"{name} of a box must be one number, or broadcast to its shape {shape}") from None
    if not (jnp.issubdtype(numbers.dtype, jnp.integer) or jnp.issubdtype(numbers.dtype, jnp.floating)):
        raise ValueError(f"{name} of a box must be numbers, not {short_repr(value)}")
    if numbers.dtype.kind == "V":  # bfloat16 and the like
        bounds = bounds.astype(np.float64)
    if bounds.size == 0 or (bounds != bounds.flat[0]).any():
        return _nest(bounds.tolist())
    return bounds.flat[0].item()


def _nest(values: Any) -> Any:
    return tuple(_nest(one) for one in values) if isinstance(values, list) else values


@pytree
class TimeStep:
    """One time step of one environment, after a reset or a step. The agent axis A is present also when A = 1.

    `restart`, `transition`, `termination` and `truncation` make one; most environments need no field with a default.

    Attributes:
        observation: pytree of arrays [A, ...] following `EnvSpec.observation`.
        reward: float32[A], reward of the action that led here; 0 after a reset.
        terminated: bool[], the episode ended here for good (the value of what follows is 0).
        truncated: bool[], the episode was cut here by a limit (bootstrap from `observation`).
        first: bool[], this is the first time step of an episode.
        metrics: {name: float32[]}, the names of `EnvSpec.metrics`.
        action_mask: bool[A, n], actions open to each agent before the others of this step are known;
            None where every action is always open (and for continuous actions).
        mask_state: whatever `EnvSpec.next_mask` needs to know, or ().
        global_state: input of a centralised critic, pytree following `EnvSpec.global_state`, or ().
        task: int32[], which of `EnvSpec.num_tasks` tasks this episode sets; () where there is but one.
        present: bool[A], agents that act in this step; what the others do has no effect and counts nowhere. () where
            all act; see `EnvSpec.absent_agents`.
        links: int32[A, A], [i, j] = how many steps of this episode ago agent j sent the message that reaches i now, -1
            if none does. () where every agent hears all others at once; see `EnvSpec.links`.
        cut: bool[A], agents that are no longer present because a limit cut their part here, while the episode goes on
            (bootstrap from `observation`); () where that never happens.
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    first: Array
    metrics: Any = dataclasses.field(default_factory=dict)
    action_mask: Any = None
    mask_state: Any = ()
    global_state: Any = ()
    task: Any = ()
    present: Any = ()
    links: Any = ()
    cut: Any = ()

    @property
    def done(self) -> Array:
        """bool[], the episode ended with this time step, terminated or truncated."""
        return self.terminated | self.truncated


def restart(observation: Any, **optional: Any) -> TimeStep:
    """Return the first time step of an episode; `optional` are the fields of `TimeStep` that have a default."""
    return dataclasses.replace(transition(0.0, observation, **optional), first=jnp.bool_(True))


def transition(
    reward: Any, observation: Any, terminated: Any = False, truncated: Any = False, **optional: Any
) -> TimeStep:
    """Return the time step after an action.

    Args:
        reward: float32[A], or one number for all agents.
        observation: pytree of arrays [A, ...].
        terminated: bool[], the episode ended here for good.
        truncated: bool[], the episode was cut here by a limit.
        optional: fields of `TimeStep` that have a default; metrics may be any numbers.

    Raises:
        ValueError: the reward has another shape.
    """
    agents = jax.tree.leaves(observation)[0].shape[0]
    if jnp.shape(reward) not in ((), (1,), (agents,)):
        raise ValueError(
            f"the reward must be one number, or {agents}, one for each agent of the observation (whose first axis is "
            f"the agents), not of shape {jnp.shape(reward)}"
        )
    metrics = {name: jnp.asarray(value, jnp.float32) for name, value in optional.pop("metrics", {}).items()}
    return TimeStep(
        observation=observation,
        reward=jnp.broadcast_to(jnp.asarray(reward, jnp.float32), (agents,)),
        terminated=jnp.asarray(terminated, jnp.bool_),
        truncated=jnp.asarray(truncated, jnp.bool_),
        first=jnp.bool_(False),
        metrics=metrics,
        **optional,
    )


def termination(reward: Any, observation: Any, **optional: Any) -> TimeStep:
    """Return the last time step of an episode that ended for good; see `transition`."""
    return transition(reward, observation, terminated=True, **optional)


def truncation(reward: Any, observation: Any, **optional: Any) -> TimeStep:
    """Return the last time step of an episode that was cut by a limit; see `transition`."""
    return transition(reward, observation, truncated=True, **optional)


def independent_mask(mask_state: Any, action_mask: Array, chosen: Array, agent: Any) -> Array:
    """Default of `EnvSpec.next_mask`: actions of the others close no action."""
    del mask_state, chosen
    return action_mask[agent]


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """Description of an environment for algorithms.

    Attributes:
        name: registered name.
        num_agents: A.
        observation: Box (or pytree of boxes) of ONE agent's observation.
        action: Discrete or Box of ONE agent's action.
        horizon: largest number of steps of an episode.
        fixed_horizon: every episode has exactly `horizon` steps, so that all copies reset together.
        full_length: all but a few episodes have `horizon` steps; `total_episodes` counts all of them like that.
        metrics: {name: how its per-step values become the episode's value}.
        labels: {metric: its label, "words" or "words, unit"}; see `label`.
        global_state: Box or pytree of boxes of `TimeStep.global_state`, or None.
        critic_input_spec: Box of ONE agent's row of `critic_input`, or None.
        next_mask: (mask_state, action_mask[A, n], chosen int32[A], agent) -> bool[n]: the mask of `agent`
            once agents 0 .. agent - 1 have chosen; entries of `chosen` from `agent` on are meaningless.
        critic_input: (timestep, action[A, ...]) -> [A, ...]: the centralised view of every agent, the other
            agents' actions included and its own excluded; -1 is an unknown discrete action. COMA makes one where there
            is none, see `critic_input`.
        score: metric (or "return") by which policies are compared.
        score_mode: "min" if a smaller `score` is better, "max" if a larger one is.
        tie_breakers: metrics (or "return") that decide in order, the larger the better, between policies of one
            score; for scores such as successes, which reach their limit long before policies stop getting better.
        num_tasks: number of tasks that episodes may set; algorithms may keep values per task, see `TimeStep.task`.
        task_names: names of these tasks, () where they have none.
        compatible_settings: {setting: value}: policies are interchangeable between environments where these are equal.
        action_order: the first n values of an agent's observation are the n actions in the order in which the other
            values describe them; networks that know it see only the other values and have their outputs in that order.
        egocentric: view of ONE agent, its observation or its row of `critic_input` -> (the view as the agent sees it,
            in a frame that symmetric situations share, int32[n]: which action of the frame each action is); or None.
        absent_agents: agents may be absent, see `TimeStep.present`; learners must give them no weight.
        links: time steps say who hears whom, see `TimeStep.links`, for learners whose agents exchange messages.
        max_link_age: the largest age of a message, steps.
        agent_types: the type of each agent, 0 or above, for learners that do not share parameters between types; ()
            where every agent is a type of its own.
        shares: metrics that are 0 or 1 in each episode, such as a game won, so that their mean is a share of the
            episodes; those reduced by "any" need not be named. See `is_share`.
    """

    name: str
    num_agents: int
    observation: Any
    action: Discrete | Box
    horizon: int
    fixed_horizon: bool = False
    full_length: bool = False
    metrics: Mapping[str, Reduction] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    global_state: Any = None
    critic_input_spec: Box | None = None
    next_mask: Callable[[Any, Array, Array, Any], Array] = independent_mask
    critic_input: Callable[[TimeStep, Array], Array] | None = None
    score: str = "return"
    score_mode: Literal["min", "max"] = "max"
    tie_breakers: tuple[str, ...] = ()
    num_tasks: int = 1
    task_names: tuple[str, ...] = ()
    compatible_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    action_order: bool = False
    egocentric: Callable[[Array], tuple[Array, Array]] | None = None
    absent_agents: bool = False
    links: bool = False
    max_link_age: int = 0
    agent_types: tuple[int, ...] = ()
    shares: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.num_agents, self.action, self.horizon))  # the mappings have no hash

    def is_share(self, metric: str) -> bool:
        """Return whether a metric is 0 or 1 in each episode; "metric/task" is the metric in episodes of one task."""
        name = metric.partition("/")[0]
        return name in self.shares or self.metrics.get(name) == "any"

    def label(self, metric: str) -> str:
        """Return the label of a metric with its unit; "metric/task" is the metric over the episodes of one task."""
        name, _, task = metric.partition("/")
        words = self.labels.get(name, "length, steps" if name == "length" else name.replace("_", " "))
        words, comma, unit = words.partition(", ")
        return words + (f" ({task})" if task else "") + comma + unit


@dataclasses.dataclass(frozen=True)
class FirstStage:
    """The easier episodes with which training begins, see `Environment.first_stage`.

    Attributes:
        name: a few words for the user.
        env: the environment that has them.
        share: share of the training's environment steps that are taken in it, 0 to 1.
    """

    name: str
    env: "Environment"
    share: float


class Environment:
    """Base class of environments. Subclass it as a frozen dataclass whose fields are the settings.

    `__post_init__` should raise ValueError, in one sentence that says how to fix it, on impossible settings.
    Everything random comes from the key passed to `reset`; a step draws from that key, which the state holds, and the
    time.
    """

    version = 1  # goes up when the rules change
    baselines: Mapping[str, Callable[..., Array]] = {}
    # ^ {name: policy(env, state, timestep, key) -> action[A, ...]}: scripted; may read the state

    @property
    def spec(self) -> EnvSpec:
        raise NotImplementedError("an environment needs a `spec` property that returns an EnvSpec")

    def reset(self, key: Array, context: Any = None) -> tuple[Any, TimeStep]:
        """Start an episode. `context` is what `self.context` returned; None: the context at the start of training."""
        raise NotImplementedError("an environment needs reset(key, context=None)")

    def step(self, state: Any, action: Array, context: Any = None) -> tuple[Any, TimeStep]:
        """Step all agents: action int32[A] (Discrete) or float[A, ...] (Box); `context` as in `reset`."""
        raise NotImplementedError("an environment needs step(state, action, context=None)")

    def context(self, progress: Progress) -> Any:
        """Return the schedules' values, read by `reset` and `step`; a pytree of arrays without batch axis."""
        del progress
        return ()

    def first_stage(self) -> FirstStage | None:
        """Return the easier environment in which training begins; its spec is that of this one. None: there is none."""
        return None

    def for_evaluation(self) -> "Environment":
        """Return the environment that chooses a run's best checkpoint; override it where training is scheduled."""
        return self

    def join(self, others: "Sequence[Environment]") -> "tuple[Environment, list[Any]] | None":
        """Return one environment for the episodes of this one and of others, which differ in settings.

        With it come the contexts, of the same shapes, in which its episodes are those of each environment at the end of
        all schedules; its agents begin with theirs, see `count_agents`, and its metrics are those of all environments.
        None: no environment has the episodes of all.
        """
        del others
        return None

    def count_agents(self, context: Any) -> Any:
        """Return how many agents there are in a context, int or int32[]: A, or fewer in the contexts of `join`."""
        del context
        return self.spec.num_agents

    def for_this_device(self) -> "Environment":
        """Return the environment with settings that compute the same and are fast on this process's device.

        New runs and loaded policies take it; a resumed run keeps the settings that it has.
        """
        return self

    def step_label(self, step: int) -> str:
        """Return the label of the time step after `step` steps; an environment may count in a unit of its own."""
        return f"step {step}"

    @property
    def match_rules(self) -> MatchRules | None:
        """The rules of matches between policies; None where there is no other team."""
        return None

    def viewer(self) -> Any:
        """Return the `envs_jax.viewing.Viewer` that draws recorded episodes, or None."""
        return None


def find(name: str) -> type[Environment]:
    """Return the class of a registered name, an adapter's "library:Name" or "module:Class". Raises ValueError."""
    if not isinstance(name, str):
        raise ValueError(f"an environment's name must be text, such as 'coverage', not {short_repr(name)}")
    library, colon, its_name = name.partition(":")
    if colon and library in ADAPTERS:
        adapter: Any = load(ADAPTERS[library], "adapter")
        return adapter.class_of(its_name)
    suggestions = difflib.get_close_matches(library[:MOST_COMPARED], ADAPTERS, n=1)
    if colon and suggestions and not its_name.isidentifier():
        raise ValueError(f"unknown environment {short_repr(name)}: did you mean '{suggestions[0]}:{its_name}'?")
    if ":" not in name and name not in registry:
        raise ValueError(f"unknown environment {short_repr(name)}: {closest(name, registry)}")
    cls = load(name if ":" in name else registry[name], "environment")
    if not (isinstance(cls, type) and issubclass(cls, Environment) and is_decorated(cls)):
        raise ValueError(
            f"environment {short_repr(name)} must be a frozen dataclass that subclasses envs_jax.Environment"
        )
    return cls


def make(name: str, **settings: Any) -> Environment:
    """Build an environment by registered name, "library:Name" of another library, or "module:Class".

    Raises:
        ValueError: unknown name or setting (the message suggests the closest), a value of another type, or an
            impossible one. Scalars of NumPy and JAX are taken where they are of the setting's type.
    """
    cls: Any = find(name)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    for key in settings:
        if key not in fields:
            raise ValueError(f"environment '{name}' has no setting {short_repr(key)}: {closest(key, fields)}")
    env = cls(**exact_settings(cls, settings))
    check_settings(env)
    return env
