"""python -m bench.studies.plans: how good can a mission of coverage be? The best plans that search finds.

The cross-entropy method (Rubinstein 1999, doi 10.1023/A:1010091220143) searches for each held-out mission the actions
of all agents and steps that leave the least entropy, with the true simulator: the search knows the ground truth and
the sensor's errors, which no policy does. What it finds bounds what policies can reach from one side only: a longer
search may find better plans. With --runs, the policies of runs fly the same missions; with --begin, the first plans
are like the actions of a policy.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import measure
from envs_jax.base import Array, Discrete
from envs_jax.batch import BatchedEnvironment
from envs_jax.progress import start
from jaxrl.cli import flags
from jaxrl.cli.entry import exit_on_error
from jaxrl.common.errors import UsageError
from jaxrl.common.types import Key
from jaxrl.evaluation import policies
from jaxrl.evaluation.reports import rollout
from jaxrl.evaluation.rollouts import held_out_key, keys_of_step
from jaxrl.evaluation.statistics import interval
from jaxrl.report.cache import enable_compilation_cache
from jaxrl.runtime.trainer import key_of_env

KIND = "plans"
SMOOTHING = 0.7  # weight of the elite's frequencies in the new probabilities
POLICY_SHARE = 0.8  # probability of the policy's actions in the first plans, with --begin


@dataclasses.dataclass(frozen=True)
class Search:
    """The cross-entropy method over plans.

    Attributes:
        env: the environment, whose actions are discrete and whose score is to be small.
        plans: number of plans per iteration.
        elite: how many of them give the next probabilities.
        iterations: number of iterations.
    """

    env: BatchedEnvironment
    plans: int
    elite: int
    iterations: int

    def fly(self, mission: Key, probabilities: Array, key: Key) -> tuple[Array, Array]:
        """Draw plans and fly them all in one mission.

        Args:
            mission: key[], of the mission.
            probabilities: float32[T, A, n], of the actions; those that the mask forbids are left out.
            key: key[], of the draws.

        Returns:
            actions int32[T, plans, A]; scores float32[plans].
        """
        spec = self.env.spec
        context = self.env.context(start())
        keys = jnp.broadcast_to(mission, (self.plans,))
        draws = jax.random.split(key, self.plans)

        def choose(timestep: Any, p: Array, key: Key) -> Array:
            """Draw the actions int32[A] of one mission, agent by agent."""
            chosen = jnp.zeros(spec.num_agents, jnp.int32)
            for agent in range(spec.num_agents):
                mask = spec.next_mask(timestep.mask_state, timestep.action_mask, chosen, jnp.int32(agent))
                logits = jnp.where(mask, jnp.log(p[agent]), -jnp.inf)
                action = jax.random.categorical(jax.random.fold_in(key, agent), logits)
                chosen = chosen.at[agent].set(action.astype(jnp.int32))
            return chosen

        def step(carry: Any, row: tuple[Array, Array]) -> tuple[Any, Array]:
            (state, timestep), (p, t) = carry, row
            action = jax.vmap(choose, in_axes=(0, None, 0))(timestep, p, keys_of_step(draws, t))
            return self.env.step_without_reset(state, action, context), action

        begun = self.env.reset(keys, context)
        rows = probabilities, jnp.arange(spec.horizon, dtype=jnp.uint32)
        (_, last), actions = jax.lax.scan(step, begun, rows)
        return actions, last.metrics[spec.score]

    @functools.partial(jax.jit, static_argnums=0)
    def best(self, mission: Key, key: Key, begin: Array | None = None) -> Array:
        """float32[iterations]: the best score so far of a search.

        Args:
            mission: key[], of the mission.
            key: key[], of the draws.
            begin: int32[T, A], actions that the first plans are like; None: equal probabilities.
        """
        spec = self.env.spec
        assert isinstance(spec.action, Discrete)
        actions = spec.action.n
        least = 0.1 / actions / self.plans  # no action is ever given up for good

        def iterate(carry: tuple[Array, Array], key: Key) -> tuple[tuple[Array, Array], Array]:
            p, best = carry
            plans, scores = self.fly(mission, p, key)
            elite = jnp.take(plans, jnp.argsort(scores)[: self.elite], axis=1)
            frequency = jnp.mean(jax.nn.one_hot(elite, actions), axis=1)
            p = jnp.maximum((1 - SMOOTHING) * p + SMOOTHING * frequency, least)
            best = jnp.minimum(best, jnp.min(scores))
            return (p / p.sum(-1, keepdims=True), best), best

        p = jnp.full((spec.horizon, spec.num_agents, actions), 1.0 / actions, jnp.float32)
        if begin is not None:
            p = (1 - POLICY_SHARE) * p + POLICY_SHARE * jax.nn.one_hot(begin, actions)
        return jax.lax.scan(iterate, (p, jnp.float32(jnp.inf)), jax.random.split(key, self.iterations))[1]


@exit_on_error
def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    assert __doc__ is not None
    parser = measure.parser(f"python -m bench.studies.{KIND}", __doc__)
    parser.add_argument("--config", default="coma_paper_cpu", metavar="NAME", help="preset whose missions are flown")
    parser.add_argument("--runs", default="", metavar="RUN,RUN", help="runs whose policies fly the same missions")
    parser.add_argument("--begin", metavar="RUN", help="run whose policy's actions the first plans are like")
    for name, default, most, what in (
        ("missions", "8", 10_000, "held-out missions"),
        ("plans", "256", 1_000_000, "plans per iteration"),
        ("elite", "16", 1_000_000, "plans that give the next probabilities"),
        ("iterations", "40", 100_000, "iterations of each search"),
        ("restarts", "2", 10_000, "searches per mission"),
    ):
        parser.add_argument(f"--{name}", default=default, metavar="N", help=f"{what} (default: {default})")
        parser.set_defaults(**{f"most_{name}": most})
    parser.add_argument("--out", metavar="FILE", help="JSON file to write (default: a new one under bench/results/)")
    parsed = parser.parse_args(list(argv))
    enable_compilation_cache()

    def number(name: str) -> int:
        return measure.parse_int(getattr(parsed, name), f"--{name}", 1, getattr(parsed, f"most_{name}"))

    missions, restarts = number("missions"), number("restarts")
    config = flags.parse(["--config", parsed.config], parser.prog).config
    assert config is not None
    subject = policies.load(None, config.env, config.env_settings)
    if subject.env.spec.score_mode != "min":
        raise UsageError(f"--config {parsed.config}: plans are searched for coverage, not for {config.env}")
    search = Search(subject.env, number("plans"), number("elite"), number("iterations"))
    if search.elite >= search.plans:
        raise UsageError(f"--elite {search.elite} must be below --plans {search.plans}")
    path = measure.output(parsed.out, KIND)
    result = measure.header(f"studies.{KIND}", argv, quick=False) | {"settings": config.env_settings}
    result |= {"missions": missions, "policies": {}, "curves": []}
    for run in filter(None, parsed.runs.split(",")):
        learned = policies.load_run(run).with_env_settings(config.env_settings)
        for name, curves in rollout(learned, ("learned",), missions, seed=0):
            scores = curves[subject.env.spec.score][-1]
            result["policies"][f"{learned.run_name}, {name}"] = {"scores": scores.tolist()} | interval(scores)
    key = held_out_key(0, "evaluation")
    if parsed.begin:
        first = policies.load_run(parsed.begin).with_env_settings(config.env_settings)
        record = first.evaluator(("learned",), 1).record()
    for index in map(jnp.int32, range(missions)):
        draws = jax.random.split(jax.random.fold_in(jax.random.key(1), index), restarts)
        begin = record(first.parameters(0), key, first.context, index)[3] if parsed.begin else None
        found = [np.asarray(search.best(key_of_env(key, index), draw, begin)) for draw in draws]
        result["curves"].append([curve.tolist() for curve in found])
        best = [min(curve[-1] for curve in curves) for curves in result["curves"]]
        result["best"] = {"scores": best} | interval(np.asarray(best))
        measure.say(f"mission {index}: {', '.join(f'{curve[-1]:.3f}' for curve in found)}")
        measure.write(result, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
