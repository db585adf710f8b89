"""PPO on a Gymnasium environment of your own: catch a falling ball with a paddle.

`python -m examples.ppo_gymnasium` trains, with the extra `gymnasium` installed; the flag is
`--env gymnasium:examples.ppo_gymnasium:Catch-v0`.
"""

from typing import Any

import gymnasium
import numpy as np

import jaxrl

WIDTH, HEIGHT = 7, 10


class Catch(gymnasium.Env):
    """A ball falls one row a step and drifts; the paddle moves left, stays or moves right."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.row = 0
        self.ball, self.paddle = (int(column) for column in self.np_random.integers(0, WIDTH, 2))
        self.drift = int(self.np_random.integers(-1, 2))
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.row += 1
        self.ball = (self.ball + self.drift) % WIDTH
        self.paddle = min(max(self.paddle + int(action) - 1, 0), WIDTH - 1)
        landed = self.row == HEIGHT - 1
        caught = landed and self.ball == self.paddle
        return self._observe(), float(caught), landed, False, {"caught": float(caught)}

    def _observe(self) -> np.ndarray:
        places = [self.row / (HEIGHT - 1), self.ball / (WIDTH - 1), self.paddle / (WIDTH - 1)]
        return np.array([*(2 * place - 1 for place in places), self.drift], np.float32)


if "Catch-v0" not in gymnasium.registry:  # jaxrl imports this file by its name, too
    gymnasium.register("Catch-v0", Catch, max_episode_steps=HEIGHT)

if __name__ == "__main__":
    result = jaxrl.train(
        "ppo", "gymnasium:examples.ppo_gymnasium:Catch-v0", info_keys="caught:any", total_env_steps=100_000,
        num_envs=16, rollout_steps=64, num_minibatches=4, hidden_size=64, actor_lr=1e-3, critic_lr=1e-3,
    )  # fmt: skip
    print(jaxrl.evaluate(result.policy, episodes=200))
