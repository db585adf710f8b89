"""One training step of COMA on a device, against the same step in float32 on this machine's CPU.

Both get the same synthetic missions and weights. Compared are the gradients, read from Adam's first moments after the
first step, by the norm of their difference over their own: not weights, whose first step under Adam has the sign of
the gradient and little else.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bench.parity.comparison import Comparison
from envs_jax import Box, Discrete, EnvSpec, TimeStep
from envs_jax.progress import start
from jaxrl.algos.base import Trajectory
from jaxrl.algos.coma import Coma
from jaxrl.common.errors import UserError
from jaxrl.rl.data_parallel import AXIS, REPLICATED, DataParallel, on_mesh

AGENTS = 4
ACTIONS = 6
SIDE = 11
NETWORKS = ("critic", "actor")
# Of networks of 8 to 256 channels, two ways to convolve on a CPU were 9e-7 apart in float32, and bfloat16 0.054 from
# float32. The ten bits of TF32 would be about 1e-3 apart: not enough where float32 is requested.
# Between them lie GPUs, whose convolutions may use Winograd's transform.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.15}


def image_spec(agents: int, actions: int, steps: int) -> EnvSpec:
    """Return the spec of coverage's images without its environment; the critic's input is the global state."""
    return EnvSpec(
        name="images",
        num_agents=agents,
        observation=Box((SIDE, SIDE, 7), low=0.0, high=1.0),
        action=Discrete(actions),
        horizon=steps,
        fixed_horizon=True,
        critic_input_spec=Box((SIDE, SIDE, 12), low=0.0, high=1.0),
        critic_input=lambda timestep, action: timestep.global_state,
    )


def missions(num_missions: int, steps: int) -> tuple[Trajectory, TimeStep]:
    """Random observations in [0, 1], open actions and rewards, [steps, num_missions, ...]; then the missions end."""
    rng = np.random.default_rng(0)
    lead = (steps, num_missions)
    mask = rng.random((*lead, AGENTS, ACTIONS)) < 0.8
    action = rng.integers(0, ACTIONS, (*lead, AGENTS)).astype(np.int32)
    np.put_along_axis(mask, action[..., None], True, -1)
    flags = jnp.zeros(lead, bool)
    timestep = TimeStep(
        observation=rng.random((*lead, AGENTS, SIDE, SIDE, 7), np.float32),
        action_mask=mask,
        global_state=rng.random((*lead, AGENTS, SIDE, SIDE, 12), np.float32),
        reward=jnp.asarray(rng.normal(size=(*lead, AGENTS)), jnp.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
    )
    last = jax.tree.map(lambda x: x[-1], timestep)
    last = TimeStep(**{**vars(last), "terminated": ~flags[0]})
    extras = {"mask": mask, "log_prob": np.full((*lead, AGENTS), -np.log(ACTIONS), np.float32)}
    return Trajectory(timestep, jnp.asarray(action), extras), last


def gradients(device: Any, dtype: str, width: int, num_missions: int, steps: int, convolution: str = "auto") -> Any:
    """Return gradients of both networks in one training step with one minibatch, as flat float64 vectors by name.

    Args:
        device: runs the step.
        dtype: of matrix products and convolutions.
        width: of the networks.
        num_missions, steps: sizes of the batch.
        convolution: as the algorithm's setting.
    """
    algo = Coma(
        image_spec(AGENTS, ACTIONS, steps),
        DataParallel(num_missions, compute_dtype=jnp.dtype(dtype)),
        minibatch_size=num_missions * steps * AGENTS,
        num_epochs=1,
        critic_lr=1e-12,  # so that the actor's gradient does not depend on the sign of the critic's
        hidden_size=width,
        convolution=convolution,  # type: ignore[arg-type]
    )
    (phase,) = algo.phases
    with jax.default_device(jax.devices("cpu")[0]):
        state = jax.jit(lambda key: algo.init(key, None))(jax.random.key(0))
        batch = jax.device_get((*missions(num_missions, steps), start()))

    def learn(state: Any, trajectory: Any, last: Any, progress: Any, key: Any) -> Any:
        return algo.learn(state, trajectory, last, key, progress, phase)[0].replicated

    mesh = Mesh(np.array([device]), (AXIS,))
    step = jax.jit(on_mesh(learn, mesh, (REPLICATED,) * 5, REPLICATED))  # as training calls it
    after = step(*jax.device_put((state, *batch, jax.random.key(1)), device))
    gradients_by_network = {}
    for name in NETWORKS:
        gradients_by_network[name] = np.asarray(
            optax.tree_utils.tree_get(getattr(after, name).opt_state, "mu"), np.float64
        )
    return gradients_by_network


def compare(
    width: int = 256, num_missions: int = 16, steps: int = 15, dtypes: Sequence[str] = tuple(BOUNDS)
) -> Comparison:
    """Compare gradients on the first device of this process, in each of `dtypes`; other arguments as in `gradients`.

    Raises UserError: JAX_PLATFORMS excludes the CPU.
    """
    try:
        host = jax.devices("cpu")[0]
    except RuntimeError:
        raise UserError("the learner is compared with this machine's processor: unset JAX_PLATFORMS") from None
    expected = gradients(host, "float32", width, num_missions, steps, "conv")
    comparison = Comparison()
    for dtype in dtypes:
        ours = gradients(jax.local_devices()[0], dtype, width, num_missions, steps)
        for name in NETWORKS:
            comparison.direction(f"gradient of the {name}, {dtype}", ours[name], expected[name], BOUNDS[dtype])
    return comparison
