"""Break the code in one place at a time and see a test of the default run fail.

    python -m scripts.check_mutations [--only WORD ...] [--python PYTHON]

Each mutation is applied by itself to a temporary copy of the tree, in which its tests run (one process, the first
failure ends them). A survivor is a rule that no test watches: exit code 1. `--only` takes words of topics or numbers.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """One change of the code: `old`, which stands once in `file`, becomes `new`; `tests` are told to pytest."""

    topic: str
    text: str
    file: str
    old: str
    new: str
    tests: str


COMA, DDPG, SAC = (f"tests/test_recorded_updates.py::test_{name}" for name in ("coma", "ddpg", "sac"))
MUTATIONS = [
    Mutation(*row)
    for row in (
        (
            "keys", "held-out episodes start from the key of training",
            "jaxrl/evaluation/rollouts.py",
            'return jax.random.fold_in(jax.random.key(seed), {"selection": 0x5E1EC7, "evaluation": 0xE7A1}[stream])',
            "return jax.random.key(seed)",
            "tests/test_selection.py::test_training_selection_and_evaluation_start_from_other_states",
        ),
        (
            "keys", "the selection stream is the evaluation stream",
            "jaxrl/evaluation/rollouts.py",
            '"evaluation": 0xE7A1',
            '"evaluation": 0x5E1EC7',
            "tests/test_selection.py::test_training_selection_and_evaluation_start_from_other_states",
        ),
        (
            "evaluation", "of scores to be minimised the worse is best",
            "jaxrl/runtime/session.py",
            'sign = -1 if spec.score_mode == "min" else 1',
            "sign = 1",
            "tests/test_selection.py::test_the_best_is_the_best_by_the_mode_of_the_score",
        ),
        (
            "losses", "the critic steps with actor_lr",
            "jaxrl/algos/base.py",
            'jnp.float32(getattr(self, f"{part}_lr")) * fraction',
            "jnp.float32(self.actor_lr) * fraction",
            DDPG,
        ),
        (
            "schedules", "exploration of ddpg falls with environment steps",
            "jaxrl/algos/ddpg.py",
            "steps = total(progress.vector_steps)",
            "steps = total(progress.env_steps)",
            "tests/test_schedules.py",
        ),
        (
            "targets", "the target actor is the actor",
            "jaxrl/algos/ddpg.py",
            "target_actor=self.soft_update(params.target_actor, actor.params, rate),",
            "target_actor=actor.params,",
            DDPG,
        ),
        (
            "losses", "the default target entropy counts all agents",
            "jaxrl/algos/sac.py",
            "standard = -float(self.action_size)",
            "standard = -float(self.action_size * self.spec.num_agents)",
            SAC,
        ),
        (
            "keys", "phases use the same keys",
            "jaxrl/runtime/trainer.py",
            "key_of_iteration(state.key, state.iterations)",
            "key_of_iteration(state.key, state.iteration)",
            "tests/test_trainer.py::test_phases_draw_from_other_keys",
        ),
        (
            "targets", "the self-play pool gets the policy before the update",
            "jaxrl/runtime/trainer.py",
            "opponent_pool.update(self.env, state.pool, self.algo.policy(algo), progress)",
            "opponent_pool.update(self.env, state.pool, self.algo.policy(state.algo), progress)",
            "tests/test_trainer.py::test_the_pool_gets_the_policy_of_after_the_update",
        ),
        (
            "evaluation", "draws count for one side",
            "jaxrl/evaluation/league.py",
            "draws[i, j] = draws[j, i] = round",
            "draws[i, j] = round",
            "tests/test_league.py::test_draws_count_for_both_sides",
        ),
        (
            "rules", "coverage: a move to the left goes to the right",
            "envs_jax/coverage/actions.py",
            "LATERAL = ((-1, 0), (0, -1), (0, 1), (1, 0))",
            "LATERAL = ((-1, 0), (0, 1), (0, -1), (1, 0))",
            "tests/test_coverage_against_oracle.py tests/test_coverage_env.py",
        ),
        (
            "rules", "coverage: two altitudes exchange their errors",
            "envs_jax/coverage/sensor.py",
            "ERROR = (0.01, 0.265, 0.375)",
            "ERROR = (0.01, 0.375, 0.265)",
            "tests/test_coverage_against_oracle.py",
        ),
        (
            "rules", "coverage: messages do not reach to the end of their range",
            "envs_jax/coverage/communication.py",
            "squared <= reach * reach",
            "squared < reach * reach",
            "tests/test_coverage_against_oracle.py tests/test_coverage_env.py",
        ),
        (
            "rules", "coverage: the last open action may be closed",
            "envs_jax/coverage/actions.py",
            "closed &= jnp.sum(mask, dtype=jnp.int32) > 1",
            "closed &= jnp.sum(mask, dtype=jnp.int32) > 0",
            "tests/test_coverage_actions.py",
        ),
        (
            "rules", "coverage: the reward is a share of the entropy after the update",
            "envs_jax/coverage/reward.py",
            "uncertain = real(before)",
            "uncertain = real(after)",
            "tests/test_coverage_against_oracle.py",
        ),
        (
            "rules", "coverage: a footprint is a cell too wide",
            "envs_jax/coverage/world.py",
            "half = q * (positions[..., 2] + 1) // 2",
            "half = (q * (positions[..., 2] + 1) + 1) // 2",
            "tests/test_coverage_golden.py::test_footprint_table",
        ),
        (
            "rules", "snakes: a bean goes to the snake with the higher number",
            "envs_jax/snakes/rules.py",
            "constant(np.triu(np.ones((snakes, snakes), bool), 1), batch)",
            "constant(np.tril(np.ones((snakes, snakes), bool), -1), batch)",
            "tests/test_snakes_against_oracle.py",
        ),
        (
            "rules", "snakes: heads that meet both live",
            "envs_jax/snakes/rules.py",
            "hit = (union(others[:, None] & new) != 0) | union(same)",
            "hit = union(others[:, None] & new) != 0",
            "tests/test_snakes_against_oracle.py",
        ),
        (
            "rules", "snakes: the team in the lead is paid as the one behind",
            "envs_jax/snakes/reward.py",
            "jnp.where(own > others, jnp.int32(1), jnp.int32(2))",
            "jnp.where(own >= others, jnp.int32(2), jnp.int32(1))",
            "tests/test_snakes_against_oracle.py tests/test_snakes_env.py",
        ),
        (
            "rules", "snakes: an episode has one step too many",
            "envs_jax/snakes/rules.py",
            "game.steps >= max_steps",
            "game.steps > max_steps",
            "tests/test_snakes_against_oracle.py",
        ),
        (
            "rules", "snakes: a meal is paid 21 by the original reward",
            "envs_jax/snakes/reward.py",
            "jnp.where(ate, 20.0,",
            "jnp.where(ate, 21.0,",
            "tests/test_snakes_golden.py::test_recorded_shaped_rewards",
        ),
        (
            "rules", "reach: success whatever the gripper does",
            "envs_jax/reach/env.py",
            "(far <= self.success_radius) & (grip_error <= 0.0) & ~start",
            "(far <= self.success_radius) & ~start",
            "tests/test_reach_env.py::test_success_by_hand",
        ),
        (
            "rules", "reach: success within 6 cm",
            "envs_jax/reach/reward.py",
            "RADIUS = 0.05",
            "RADIUS = 0.06",
            "tests/test_reach_env.py::test_success_by_hand",
        ),
        (
            "rules", "reach: actions are not clipped",
            "envs_jax/reach/env.py",
            "jnp.clip(action[0], -1.0, 1.0)",
            "jnp.clip(action[0], -2.0, 2.0)",
            "tests/test_reach_env.py::test_a_few_steps_are_those_of_the_oracle",
        ),
        (
            "rules", "reach: the puck sinks twice as far",
            "envs_jax/reach/observation.py",
            "puck[2] + sunk",
            "puck[2] + 2 * sunk",
            "tests/test_reach_golden.py::test_observations_targets_and_successes",
        ),
        (
            "rules", "an episode that has ended goes on in a batch of mixed ends",
            "envs_jax/batch.py",
            "return jax.lax.cond(jnp.any(done), mixed, play, state)",
            "return play(state)",
            "tests/test_batch.py::test_the_step_after_an_end_restarts",
        ),
        (
            "targets", "TD(lambda) weights exchanged",
            "jaxrl/rl/returns.py",
            "(1 - lambda_) * value + lambda_ * target",
            "lambda_ * value + (1 - lambda_) * target",
            COMA,
        ),
        (
            "targets", "bootstrap of n steps discounted once",
            "jaxrl/rl/replay.py",
            "jnp.prod(jnp.where(going, jnp.float32(gamma), 1.0))",
            "jnp.float32(gamma)",
            DDPG,
        ),
        (
            "targets", "episodes that were cut count as terminated",
            "jaxrl/rl/replay.py",
            "jnp.any(going & (end_t == TERMINATED))",
            "jnp.any(going & (end_t != CONTINUES))",
            DDPG,
        ),
        (
            "targets", "the actor chooses in the target of ddpg",
            "jaxrl/algos/ddpg.py",
            'outputs = self.outputs("actor", params.target_actor, observation)',
            'outputs = self.outputs("actor", params.actor.params, observation)',
            DDPG,
        ),
        (
            "targets", "ddpg: the noise on continuous target actions is not cut",
            "jaxrl/algos/ddpg_actions.py",
            "jnp.clip(self.target_deviation * noise, -self.target_clip, self.target_clip)",
            "self.target_deviation * noise",
            "tests/test_ddpg.py::test_targets_of_continuous_actions_by_hand",
        ),
        (
            "targets", "ddpg: targets by the mean of the critics",
            "jaxrl/algos/ddpg.py",
            "lambda values: values.min(0)",
            "lambda values: values.mean(0)",
            "tests/test_ddpg.py::test_targets_of_continuous_actions_by_hand",
        ),
        (
            "schedules", "targets move with every update",
            "jaxrl/algos/off_policy.py",
            "number % every == 0, self.tau, 0.0",
            "number >= 0, self.tau, 0.0",
            "tests/test_ddpg.py::test_actor_and_targets_wait_for_the_updates_that_are_due",
        ),
        (
            "targets", "coma: targets by the critic, not by its copy",
            "jaxrl/algos/coma.py",
            'self.nets.values(params.target, sample["critic_input"])',
            'self.nets.values(params.critic.params, sample["critic_input"])',
            COMA,
        ),
        (
            "targets", "coma: the critic is copied one training step late",
            "jaxrl/algos/coma.py",
            "copy = progress.learn_calls[1] % self.target_update_period == 0",
            "copy = progress.learn_calls[1] % self.target_update_period == 1",
            COMA,
        ),
        (
            "losses", "coma: the baseline is the mean over actions",
            "jaxrl/algos/coma.py",
            'jnp.sum(action_probs * sample["values"], axis=-1)\n',
            'jnp.mean(sample["values"], axis=-1)\n',
            COMA,
        ),
        (
            "losses", "coma: the surrogate is not the smaller one",
            "jaxrl/rl/policy_gradient.py",
            "-jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * advantage)",
            "-(jnp.clip(ratio, 1 - clip_ratio, 1 + clip_ratio) * advantage)",
            COMA,
        ),
        (
            "losses", "coma: target_kl stops a policy that is near and lets one go that is far",
            "jaxrl/algos/coma.py",
            'active &= means["kl"] <= 1.5',
            'active &= means["kl"] >= 1.5',
            "tests/test_coma.py::test_a_policy_that_has_moved_too_far_is_left_alone",
        ),
        (
            "losses", "coma: the entropy bonus is a cost",
            "jaxrl/algos/coma.py",
            "value = value - self.entropy_bonus(progress) * mean_entropy",
            "value = value + self.entropy_bonus(progress) * mean_entropy",
            COMA,
        ),
        (
            "ppo", "advantages run on over the end of an episode",
            "jaxrl/algos/ppo.py",
            "lambda_t = self.gae_lambda * over_agents(~following.done)",
            "lambda_t = self.gae_lambda * over_agents(~following.terminated)",
            "tests/test_ppo.py::test_advantages_are_sums_of_temporal_differences",
        ),
        (
            "ppo", "truncated episodes do not bootstrap",
            "jaxrl/algos/ppo.py",
            "discount = self.gamma * over_agents(~following.terminated)",
            "discount = self.gamma * over_agents(~following.done)",
            "tests/test_ppo.py::test_values_are_the_known_ones",
        ),
        (
            "ppo", "the surrogate is the larger one",
            "jaxrl/rl/policy_gradient.py",
            "return -jnp.minimum(ratio * advantage",
            "return -jnp.maximum(ratio * advantage",
            "tests/test_ppo.py::test_the_clipped_loss_and_its_gradient_by_hand",
        ),
        (
            "ppo", "ignored actions weigh as much as others",
            "jaxrl/algos/ppo.py",
            "weight = batches.flatten(batches.weights(trajectory))",
            "weight = jnp.ones_like(batches.flatten(batches.weights(trajectory)))",
            "tests/test_ppo.py::test_an_iteration_is_that_of_a_plain_calculation",
        ),
        (
            "ppo", "targets are learned in the old scale",
            "jaxrl/algos/ppo.py",
            'target = statistics["value"].normalize(target)',
            'target = params.statistics["value"].normalize(target)',
            "tests/test_ppo.py::test_an_iteration_is_that_of_a_plain_calculation",
        ),
        (
            "ppo", "probabilities of masked policies are those without masks",
            "jaxrl/algos/actor_critic.py",
            'jnp.where(sample["mask"], outputs, MASKED)',
            "outputs",
            "tests/test_ppo.py::test_masked_actions_are_never_sampled",
        ),
        (
            "ppo", "an action that is all but excluded is never found",
            "jaxrl/algos/actor_critic.py",
            "jnp.clip(logits, LEAST, 0.0)",
            "logits",
            "tests/test_ppo.py::test_masked_actions_are_never_sampled",
        ),
        (
            "ppo", "a central critic sees what one agent observes",
            "jaxrl/algos/actor_critic.py",
            "shared = jnp.broadcast_to(step.global_state",
            "shared = 0 * jnp.broadcast_to(step.global_state",
            "tests/test_ppo.py::test_values_are_the_known_ones",
        ),
        (
            "losses", "ddpg: the entropy bonus is a cost",
            "jaxrl/algos/ddpg.py",
            "loss = loss - self.entropy_weight",
            "loss = loss + self.entropy_weight",
            DDPG,
        ),
        (
            "targets", "sac: targets by the first critic alone",
            "jaxrl/algos/sac.py",
            "soft_value(values, log_prob, jnp.exp",
            "soft_value(values[:1], log_prob, jnp.exp",
            SAC,
        ),
        (
            "losses", "sac: entropy costs",
            "jaxrl/algos/sac.py",
            " - alpha[:, None] * log_prob",
            " + alpha[:, None] * log_prob",
            SAC,
        ),
        (
            "losses", "sac: the temperature falls where entropy is missing",
            "jaxrl/algos/sac.py",
            "(-fixed - self.entropy_target)",
            "(fixed + self.entropy_target)",
            SAC,
        ),
        (
            "replay", "the next observation is one row too early",
            "jaxrl/rl/replay.py",
            "last = (row + jnp.sum(_going(end), axis=1, dtype=jnp.int32)) % size * envs + env",
            "last = (row + jnp.sum(_going(end), axis=1, dtype=jnp.int32) - 1) % size * envs + env",
            "tests/test_replay.py",
        ),
        (
            "replay", "windows may begin at an episode's last row",
            "jaxrl/rl/replay.py",
            '(jnp.take(end.reshape(-1), index, mode="clip") == CONTINUES) & (filled >= n_step)',
            "(index >= 0) & (filled >= n_step)",
            "tests/test_replay.py",
        ),
        (
            "keys", "every step of an iteration draws the same numbers",
            "jaxrl/runtime/trainer.py",
            "jax.random.fold_in(key, t), state.progress)",
            "jax.random.fold_in(key, 0 * t), state.progress)",
            "tests/test_trainer.py::test_steps_and_environments_draw_from_other_keys",
        ),
        (
            "keys", "all updates of a call draw the same batch",
            "jaxrl/algos/replay_learner.py",
            "jax.random.split(jax.random.fold_in(key, n))",
            "jax.random.split(jax.random.fold_in(key, 0 * n))",
            "tests/test_schedules.py",
        ),
        (
            "keys", "all episodes of a copy are the same",
            "envs_jax/batch.py",
            "episode_keys = jax.vmap(jax.random.fold_in)(keys, episode)",
            "episode_keys = jax.vmap(jax.random.fold_in)(keys, 0 * episode)",
            "tests/test_batch.py",
        ),
        (
            "schedules", "learning rates rise",
            "jaxrl/algos/base.py",
            '1 - (1 - getattr(self, "final_lr_fraction", 1.0)) * progress',
            '1 + (1 - getattr(self, "final_lr_fraction", 1.0)) * progress',
            "tests/test_off_policy.py::test_learning_rates_fall_to_their_final_share",
        ),
        (
            "schedules", "coma explores as if no mission had been flown",
            "jaxrl/algos/coma.py",
            "episode = total(progress.episodes) + self.layout.num_envs",
            "episode = 0.0 * total(progress.episodes) + self.layout.num_envs",
            COMA,
        ),
        (
            "schedules", "the actor of sac steps with every update",
            "jaxrl/algos/off_policy.py",
            "jax.lax.cond(number % period == 0,",
            "jax.lax.cond(number >= 0,",
            SAC,
        ),
        (
            "checkpoint", "a flipped byte is not noticed",
            "jaxrl/runtime/manifest.py",
            "if _digest(folder / name) != digest:",
            "if False:",
            "tests/test_checkpoint.py",
        ),
        (
            "checkpoint", "a run that goes on compiles as if its phase were over",
            "jaxrl/runtime/run.py",
            "return compile_run(setup, inputs, console.say, position, ",
            "return compile_run(setup, inputs, console.say, dataclasses.replace(position, iteration=10**6), ",
            "tests/test_session.py::test_stopped_by_a_signal",
        ),
        (
            "checkpoint", "a finished run is never evaluated, whatever is asked for now",
            "jaxrl/runtime/build.py",
            "if run.eval_every and (any(left) or evaluated != at.iterations):",
            "if run.eval_every and any(left):",
            "tests/test_session.py::test_only_what_is_left_of_a_run_is_compiled",
        ),
        (
            "checkpoint", "a change of learn_chunk on the same devices is not noticed",
            "jaxrl/runtime/run.py",
            'if meta["devices"] != setup.mesh.size:',
            "if True:",
            "tests/test_session.py::test_samples_per_gradient_follow_the_number_of_devices_and_nothing_else",
        ),
        (
            "memory", "the shortest phase is planned for",
            "jaxrl/runtime/memory_plan.py",
            "sorted(algo.phases, key=lambda phase: phase.steps)",
            "sorted(algo.phases, key=lambda phase: -phase.steps)",
            "tests/test_plan.py::test_the_longest_phase_counts_wherever_it_stands",
        ),
        (
            "checkpoint", "the oldest are kept",
            "jaxrl/runtime/orbax_manager.py",
            "index >= first or",
            "index < self.newest or",
            "tests/test_checkpoint.py",
        ),
        (
            "evaluation", "an episode that has ended goes on counting",
            "jaxrl/evaluation/rollouts.py",
            "new_statistics = where(done, statistics, new_statistics)",
            "pass",
            "tests/test_evaluate.py",
        ),
        (
            "evaluation", "the interval forgets the number of episodes",
            "jaxrl/evaluation/statistics.py",
            "error = deviation / number**0.5",
            "error = deviation",
            "tests/test_statistics.py",
        ),
        (
            "evaluation", "policies are compared as if their episodes were others",
            "jaxrl/evaluation/statistics.py",
            "np.asarray(first, np.float64) - second",
            "np.asarray(first, np.float64) - np.roll(second, 1)",
            "tests/test_statistics.py",
        ),
        (
            "evaluation", "every episode of an evaluation is the same one",
            "jaxrl/evaluation/rollouts.py",
            "keys = jax.vmap(key_of_env, in_axes=(None, 0))(seed_key, indices)",
            "keys = jax.vmap(key_of_env, in_axes=(None, 0))(seed_key, 0 * indices)",
            "tests/test_evaluate.py",
        ),
    )
]  # fmt: skip


def copy_tree(folder: Path) -> None:
    """The files that git knows or would, and the compiled programs of former runs by a link."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(ROOT / ".cache")


def fault(mutation: Mutation, folder: Path) -> str:
    """Why a mutation cannot be tried in the tree under `folder`; "" if it can."""
    path = folder / mutation.file
    if not path.is_file():
        return f"there is no file {mutation.file}"
    times = path.read_text().count(mutation.old)
    if times != 1:
        return f"the old text stands {times} times in {mutation.file}"
    for test in mutation.tests.split():
        file, _, function = test.partition("::")
        if not (folder / file).is_file():
            return f"there is no test file {file}"
        if function and not re.search(rf"^def {function}\(", (folder / file).read_text(), re.MULTILINE):
            return f"there is no test {function} in {file}"
    return "" if mutation.tests.split() else "no test is named"


def run_tests(folder: Path, tests: str, python: str) -> tuple[str, str]:
    """("caught", the test that failed), ("survived", "") or ("error", what pytest said)."""
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *tests.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return "survived", ""
    if done.returncode == 1 and failed:
        return "caught", failed[1]
    return "error", (done.stdout + done.stderr)[-1500:]


def main() -> int:
    """Print a row for each mutation; 1 if one of them survived or could not be tried."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="numbers, or words of topic, text or file")
    parser.add_argument("--python", default=sys.executable, help="interpreter that runs the tests")
    arguments = parser.parse_args()
    chosen = [
        (number, mutation)
        for number, mutation in enumerate(MUTATIONS, 1)
        if not arguments.only
        or any(
            word == str(number)
            or (not word.isdecimal() and word in f"{mutation.topic} {mutation.text} {mutation.file}")
            for word in arguments.only
        )
    ]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="mutations_") as name:
        folder = Path(name)
        copy_tree(folder)
        for number, mutation in chosen:
            began = time.monotonic()
            outcome, by = "error", fault(mutation, folder)
            if not by:
                path = folder / mutation.file
                text = path.read_text()
                path.write_text(text.replace(mutation.old, mutation.new))
                outcome, by = run_tests(folder, mutation.tests, arguments.python)
                path.write_text(text)
            bad += outcome != "caught"
            seconds = time.monotonic() - began
            print(f"{number:2} | {mutation.topic} | {mutation.text} | {outcome} | {by} | {seconds:.0f} s", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} caught")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
