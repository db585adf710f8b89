"""Policies in other formats: their greedy actions are the policy's own, without jaxrl on the path."""

import dataclasses
import functools
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.exported import OPENERS, PACKAGES, load_agent
from helpers.tiny import Corridor, PointMass, TinyQ
from helpers.whisper import Whisper

import jaxrl
from envs_jax.base import Discrete, TimeStep, make
from envs_jax.coverage import actions as coverage_actions
from jaxrl.algos.base import Custom
from jaxrl.algos.collective.algorithm import Collective
from jaxrl.algos.coma import Coma
from jaxrl.algos.ddpg import Ddpg
from jaxrl.algos.ppo import Ppo
from jaxrl.algos.sac import Sac
from jaxrl.algos.student import TEACHER_SETTINGS, Student
from jaxrl.common.errors import UsageError, UserError
from jaxrl.integrations.export.formats import export
from jaxrl.rl.data_parallel import DataParallel
from jaxrl.runtime.policy import Policy

SAMPLES, STEPS = 32, 5
OFF: dict[str, Any] = {"hidden_size": 8, "batch_size": 8, "buffer_size": 64, "env_steps_per_update": 1}
SMALL: dict[str, Any] = {
    "hidden_size": 8, "context_length": 3, "embedding_size": 8, "num_heads": 2, "num_layers": 1, "feedforward_size": 8,
    "batch_size": 8, "transformer_batch": 8,
}  # fmt: skip
MODERN: dict[str, Any] = OFF | {"first_layer": "relu", "layer_norm": True, "masking": True, "scale_observation": True}


def make_policy(env: Any, algo: Any, **settings: Any) -> Policy:
    algorithm = algo(env.spec, DataParallel(1), **settings)
    params = jax.jit(lambda key: algorithm.policy(algorithm.init(key, None)))(jax.random.key(0))
    # larger weights make actions differ between observations, but continuous ones saturate
    factor = 3.0 if isinstance(env.spec.action, Discrete) else 1.0
    return Policy(env, algorithm, jax.tree.map(lambda x: factor * x, params))


def taught() -> Policy:
    env = make("reach", horizon=9)
    teacher = Collective(env.spec, DataParallel(1), **SMALL)
    adopted = json.dumps({name: getattr(teacher, name) for name in TEACHER_SETTINGS})
    return make_policy(env, Student, resolved_inputs=adopted, random_steps=8, **OFF)


class Plain(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(self.outputs)(nn.tanh(nn.Dense(8)(x)))


POLICIES: dict[str, Callable[[], Policy]] = {
    "coma": lambda: make_policy(make("coverage", q=5), Coma, hidden_size=8),
    "coma_egocentric": lambda: make_policy(make("coverage", q=5), Coma, hidden_size=8, egocentric=True, stride=2),
    "coma_vectors": lambda: make_policy(Corridor(num_agents=2), Coma, hidden_size=8, minibatch_size=80),
    "ddpg": lambda: make_policy(make("snakes_1v1"), Ddpg, masking=False, **OFF),
    "ddpg_masked": lambda: make_policy(make("snakes_3v3", masks=True, observation="obs_full"), Ddpg, **MODERN),
    "ddpg_continuous": lambda: make_policy(PointMass(num_agents=2, box=0.5), Ddpg, **OFF),
    "bicnet": lambda: make_policy(make("snakes_3v3"), Ddpg, network="bicnet", **OFF),
    "sac": lambda: make_policy(make("reach"), Sac, **OFF),
    "ppo": lambda: make_ppo(Corridor(num_agents=2), normalize_observation="always"),
    "ppo_box": lambda: make_ppo(PointMass(num_agents=2, box=0.5), normalize_observation="always"),
    "ppo_box_plain": lambda: make_ppo(PointMass(), normalize_observation="never"),
    "ppo_images": lambda: make_ppo(make("coverage", q=5), stride=2, normalize_observation="always"),
    "ppo_egocentric": lambda: make_ppo(make("coverage", q=5), stride=2, egocentric=True, normalize_observation="never"),
    "ppo_gru": lambda: make_ppo(Corridor(num_agents=2), normalize_observation="always", memory="gru", memory_size=6),
    "ppo_lstm_box": lambda: make_ppo(PointMass(num_agents=2, box=0.5), memory="lstm", memory_size=6, memory_layers=2),
    "coma_gru": lambda: make_policy(
        make("coverage", q=5), Coma, hidden_size=8, egocentric=True, stride=2, memory="gru", memory_size=6
    ),
    "ppo_messages": lambda: make_ppo(Whisper(delay=1), message_passing="attention", message_heads=2, memory="gru"),
    "coma_types": lambda: make_policy(
        Corridor(num_agents=2), Coma, hidden_size=8, minibatch_size=80, share_parameters=False
    ),
    "ppo_types_images": lambda: make_ppo(make("coverage", q=5), stride=2, share_parameters=False, depth=1),
    "coma_types_images": lambda: make_policy(
        make("coverage", q=5), Coma, hidden_size=8, egocentric=True, stride=2, memory="gru", share_parameters=False
    ),
    "student": taught,
    "collective": lambda: make_policy(make("reach", horizon=9), Collective, **SMALL),
    "own_network": lambda: make_policy(PointMass(), Sac, custom=Custom({"actor": Plain}), **OFF),
    "own_algorithm": lambda: make_tiny(),
}
NUMPY = [
    name
    for name in POLICIES
    if name not in ("collective", "own_network", "own_algorithm", "ppo_messages") and "_types" not in name
]

EXPORTED_BY_DAY = ("coma_vectors", "ddpg_continuous", "ppo_gru")
AT_NIGHT = {  # in NumPy, of which others have all parts
    "coma_egocentric", "coma_vectors", "ddpg_continuous", "bicnet", "ppo", "ppo_box_plain", "ppo_images",
    "ppo_egocentric",
}  # fmt: skip


def make_ppo(env: Any, **settings: Any) -> Policy:
    """Statistics of inputs as if they had been seen: one number hardly ever changes, another one is far from 0."""
    policy = make_policy(env, Ppo, hidden_size=8, num_minibatches=1, initializer="torch", **settings)
    policy = dataclasses.replace(policy, params=jax.tree.map(lambda x: 2 * x, policy.params))  # means beyond the box
    keys = jax.random.split(jax.random.key(2))
    for statistics in policy.params["statistics"].values():
        variance = jnp.exp(jax.random.normal(keys[0], statistics.mean.shape)).at[..., 1:2].set(1e-6)
        statistics = dataclasses.replace(
            statistics, mean=jax.random.normal(keys[1], statistics.mean.shape), variance=variance
        )
        policy = dataclasses.replace(policy, params=policy.params | {"statistics": {"actor": statistics}})
    return policy


def make_tiny() -> Policy:
    policy = make_policy(Corridor(), TinyQ)
    return dataclasses.replace(policy, params=jax.random.normal(jax.random.key(1), policy.params.shape))


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy, time steps [SAMPLES, ...] in order, and the policy's greedy actions on them."""

    policy: Policy
    timesteps: list[TimeStep]
    actions: list[np.ndarray]

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """All fields of a time step that have one leaf, by name."""
        fields = {field.name: getattr(self.timesteps[step], field.name) for field in dataclasses.fields(TimeStep)}
        return {name: np.asarray(x) for name, x in fields.items() if isinstance(x, jax.Array)}


@functools.cache
def case(name: str) -> Case:
    """The case of a policy, made once."""
    policy = POLICIES[name]()
    carry, timesteps, actions = None, [], []
    for step in range(STEPS if policy.algo.recurrent else 1):
        timesteps.append(drawn(policy, step))
        action, carry = policy(timesteps[-1], carry=carry)
        actions.append(np.asarray(action))
    return Case(policy, timesteps, actions)


def drawn(policy: Policy, step: int) -> TimeStep:
    """A random time step [SAMPLES, ...]; episodes begin with the first one, some anew at the third."""
    rng = np.random.default_rng(step)
    spec = policy.env.spec
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((SAMPLES, *x.shape[1:]), x.dtype), policy._blank)

    def numbers(shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 9, shape.shape), shape.dtype)
        return jnp.asarray(rng.normal(size=shape.shape), shape.dtype)

    begins = np.full(SAMPLES, step == 0) | ((step == 2) & (np.arange(SAMPLES) % 3 == 0))
    changes: dict[str, Any] = {"first": jnp.asarray(begins)}
    if shapes.action_mask is not None:
        mask = rng.random(shapes.action_mask.shape) < 0.6
        mask[..., 0] |= ~mask.any(-1)
        changes["action_mask"] = jnp.asarray(mask)
    if spec.name == "coverage":  # close together, so that masks depend on the others
        places = jnp.asarray(rng.integers(0, 3, shapes.mask_state.shape), jnp.int32)
        masks = jax.vmap(lambda x: coverage_actions.boundary_mask(x, spec.action.n))(places)
        changes |= {"mask_state": places, "action_mask": masks}
    filled = jax.tree.map(numbers, dataclasses.replace(shapes, terminated=(), truncated=(), first=(), action_mask=None))
    false = jnp.zeros(SAMPLES, bool)
    return dataclasses.replace(filled, terminated=false, truncated=false, **changes)


def check(case: Case, step: int, action: Any) -> None:
    """Discrete actions are equal, continuous ones but for rounding; and they differ between observations."""
    expected = case.actions[step]
    assert action.dtype == expected.dtype
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(action, expected)
    assert len(np.unique(expected.reshape(SAMPLES, -1), axis=0)) > 1


def parametrize_exports() -> list[Any]:
    """Every policy in every format that has it; what runs by day has all kinds of inputs and outputs."""
    params = []
    for form, packages in PACKAGES.items():
        for name in NUMPY if form == "numpy" else POLICIES:
            by_day = name not in AT_NIGHT if form == "numpy" else name in EXPORTED_BY_DAY
            marks = [pytest.mark.needs(*packages)] if packages else []
            marks += [] if by_day else [pytest.mark.slow]
            params.append(pytest.param(form, name, marks=marks, id=f"{form}-{name}"))
    return params


@pytest.mark.parametrize(("form", "name"), parametrize_exports())
def test_actions_are_those_of_the_policy(form: str, name: str, tmp_path: Path) -> None:
    """Step after step; of a few environments, and in NumPy of one without a batch axis."""
    exported_case = case(name)
    export(exported_case.policy, form, tmp_path)
    act = OPENERS[form](tmp_path)
    carry = carry_of_one = None
    for step, expected in enumerate(exported_case.actions):
        arrays = exported_case.arrays(step)
        (action,), carry = act(arrays, carry)
        check(exported_case, step, action)
        if form == "numpy":
            (one,), carry_of_one = act({key: x[3] for key, x in arrays.items()}, carry_of_one)
            np.testing.assert_allclose(one, expected[3], rtol=1e-4, atol=1e-5)
    assert bool(carry) == exported_case.policy.algo.recurrent
    (action,), _ = act(*jax.tree.map(lambda x: x[:3], (arrays, carry)))
    assert action.shape == (3, *expected.shape[1:])


def test_what_a_policy_in_numpy_refuses(tmp_path: Path) -> None:
    recurrent = case("ppo_gru")
    export(recurrent.policy, "numpy", tmp_path)
    act = load_agent(tmp_path).act
    heeded = {name: recurrent.arrays(0)[name] for name in ("observation", "action_mask", "first")}
    _, carry = act(**heeded)
    few = {name: x[:2] for name, x in heeded.items()}
    with pytest.raises(ValueError, match="carry and observations have different numbers of environments"):
        act(**few, carry=carry)
    for wrong in ({}, carry | {"hidden9": 0}, tuple(carry.values())):
        with pytest.raises(ValueError, match="carry must be what the last call returned, with hidden1"):
            act(**heeded, carry=wrong)
    with pytest.raises(ValueError, match="observations need the shape"):
        act(heeded["observation"][0, 0])
    export(case("ddpg").policy, "numpy", tmp_path)
    with pytest.raises(ValueError, match="the policy has no memory"):
        load_agent(tmp_path).act(case("ddpg").arrays(0)["observation"], carry={})


@pytest.mark.needs("flatbuffers")
def test_inputs_are_those_that_actions_depend_on(tmp_path: Path) -> None:
    for name, expected in (
        ("coma", ["observation", "action_mask", "mask_state"]),
        ("coma_vectors", ["observation", "action_mask"]),
        ("ddpg_masked", ["observation", "action_mask"]),
        ("collective", ["observation", "reward", "first"]),
        ("ppo_gru", ["observation", "first", "action_mask"]),
    ):
        export(case(name).policy, "stablehlo", tmp_path / name)
        manifest = json.loads((tmp_path / name / "policy.json").read_text())
        assert [row["name"] for row in manifest["inputs"]] == expected
        assert manifest["environment"] == case(name).policy.env.spec.name and manifest["algorithm"]
        assert manifest["inputs"][0]["shape"][0] == "batch" and manifest["inputs"][0]["about"]


@pytest.mark.parametrize("n", [4, 6, 27])
def test_masks_of_coverage_are_those_of_the_environment(n: int, tmp_path: Path) -> None:
    export(case("ddpg").policy, "numpy", tmp_path)
    rule = load_agent(tmp_path).coverage_mask
    rng, moves = np.random.default_rng(n), coverage_actions.MOVES[n]
    for _ in range(50):
        places = rng.integers(0, 3, (4, 3)).astype(np.int32)
        chosen, boundary = rng.integers(0, n, 4).astype(np.int32), np.asarray(coverage_actions.boundary_mask(places, n))
        for agent in range(4):
            expected = _next_mask(places, boundary, chosen, jnp.int32(agent), n)
            actual = rule(moves, np.array([10, 10, 2]), places, boundary, chosen, agent)
            np.testing.assert_array_equal(actual, expected)


_next_mask = jax.jit(coverage_actions.next_mask, static_argnums=4)


def test_masks_of_other_environments_are_passed(tmp_path: Path) -> None:
    """A rule in NumPy is heeded; without one there is a sentence."""
    env = Corridor(num_agents=2)
    policy = case("coma_vectors").policy
    policy = dataclasses.replace(
        policy,
        algo=dataclasses.replace(
            policy.algo,
            spec=dataclasses.replace(
                env.spec,
                next_mask=lambda state, mask, chosen, agent: (
                    mask[agent] & ((agent == 0) | (jnp.arange(2) != chosen[0]))
                ),
            ),
        ),
    )
    export(policy, "numpy", tmp_path)
    observation = np.asarray(case("coma_vectors").timesteps[0].observation)
    module = load_agent(tmp_path)

    def plain(state: Any, mask: Any, chosen: Any, agent: Any) -> Any:
        return mask[agent] & ((agent == 0) | (np.arange(2) != chosen[0]))

    open_ = np.ones((SAMPLES, 2, 2), bool)
    chosen = module.act(observation, open_, next_mask=plain)
    assert np.all(chosen[:, 0] != chosen[:, 1]) and np.ptp(chosen[:, 0]) == 1
    np.testing.assert_array_equal(chosen[5], module.act(observation[5], open_[5], next_mask=plain))
    with pytest.raises(ValueError, match="pass next_mask"):
        module.act(observation, open_)
    with pytest.raises(ValueError, match="closes every action of agent 1: leave at least one open"):
        module.act(observation, open_, next_mask=lambda state, mask, chosen, agent: mask[agent] & (agent == 0))


@pytest.mark.needs("safetensors")
@pytest.mark.parametrize("name", ["coma", "student", "own_algorithm"])
def test_safetensors(name: str, tmp_path: Path) -> None:
    import safetensors

    policy = case(name).policy
    (path,) = export(policy, "safetensors", tmp_path)
    with safetensors.safe_open(path, framework="np") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert metadata["environment"] == policy.env.spec.name and json.loads(metadata["settings"]) == {}
    assert metadata["jaxrl_version"] == jaxrl.__version__
    assert len(tensors) == len(jax.tree.leaves(policy.params))
    if name == "coma":
        np.testing.assert_array_equal(tensors["params.head.fc1_kernel"], policy.params["params"]["head"]["fc1_kernel"])
    if name == "student":
        assert "teacher.actor.params.head.out_bias" in tensors and "actor.params.fc1_kernel" in tensors


ALONE = """
import json, sys
for name in ("jaxrl", "envs_jax", "flax", *sys.argv[2:]):
    sys.modules[name] = None  # an import of it raises
import numpy as np
folder = sys.argv[1]
data = np.load(folder + "/case.npz")
if "jax" in sys.argv[2:]:
    sys.path.insert(0, folder)
    import agent
    action = agent.act(data["observation"], data["action_mask"], data["mask_state"])
else:
    from jax import export, numpy as jnp
    function = export.deserialize(bytearray(open(folder + "/policy.stablehlo", "rb").read()))
    names = [row["name"] for row in json.load(open(folder + "/policy.json"))["inputs"]]
    action = np.asarray(function.call(*(data[name] for name in names)))
assert np.array_equal(action, data["action"]), (action, data["action"])
print("equal")
"""


@pytest.mark.parametrize(
    ("form", "absent"),
    [pytest.param("stablehlo", [], marks=pytest.mark.needs("flatbuffers")), ("numpy", ["jax"])],
)
def test_the_files_suffice(form: str, absent: list[str], tmp_path: Path) -> None:
    """In a new process, from which jaxrl, its environments and flax cannot be imported."""
    exported_case = case("coma")
    export(exported_case.policy, form, tmp_path)
    np.savez(tmp_path / "case.npz", action=exported_case.actions[0], **exported_case.arrays(0))
    words = [sys.executable, "-c", ALONE, str(tmp_path), *absent]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("equal\n", "")


class Odd(Ddpg):
    """Acts in its own way."""

    def act(self, *words: Any) -> Any:
        return super().act(*words)


class Sorting(TinyQ):
    """Computes what has no rule in ONNX."""

    def act(self, policy: Any, carry: Any, timestep: TimeStep, *rest: Any) -> Any:
        order = jnp.sort(timestep.observation @ policy, axis=-1)
        return order[..., 0].astype(jnp.int32), carry, ()


def test_refusals_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = case("own_algorithm").policy

    def check_refusal(policy: Any, form: Any, sentence: str, path: Any = tmp_path, kind: type = UsageError) -> None:
        with pytest.raises(kind, match=sentence) as caught:
            export(policy, form, path)
        assert "\n" not in str(caught.value)

    check_refusal(policy, "onx", "unknown format 'onx': did you mean 'onnx'?")
    check_refusal(policy, None, "unknown format None")
    check_refusal(
        policy, "numpy", "for coma, ddpg, bicnet, sac, ppo and student, not for tinyq: choose --format stablehlo"
    )
    check_refusal(POLICIES["collective"](), "numpy", "not for collective")
    check_refusal(POLICIES["own_network"](), "numpy", "the library's own networks, not for Plain")
    ddpg = case("ddpg").policy
    check_refusal(dataclasses.replace(ddpg, algo=Odd(ddpg.env.spec, DataParallel(1), **OFF)), "numpy", "not for odd")
    check_refusal(case("sac").policy, "jidi", "the jidi format is for snakes")
    ordered = make_policy(make("snakes_1v1", observation="obs_heading"), Ddpg, **OFF)
    check_refusal(ordered, "numpy", "in the order that the observation gives")
    check_refusal(policy, "stablehlo", "name the directory to write to", path=3)
    (tmp_path / "file").write_text("")
    check_refusal(
        case("ddpg").policy, "numpy", "cannot write to .*: choose another --out", tmp_path / "file", UserError
    )
    check_refusal("nowhere", "numpy", "nowhere does not exist", kind=UserError)
    for module, package, form in (
        ("onnx", "onnx", "onnx"),
        ("safetensors.numpy", "safetensors", "safetensors"),
        ("flatbuffers", "flatbuffers", "stablehlo"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        check_refusal(policy, form, rf"needs the package {package}: .*\.\[export\]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.needs("onnx")
def test_onnx_names_what_it_has_no_rule_for(tmp_path: Path) -> None:
    policy = case("own_algorithm").policy
    sorting = dataclasses.replace(policy, algo=Sorting(policy.env.spec, DataParallel(1)))
    with pytest.raises(UsageError, match="no rule for 'sort', which this policy computes: choose --format stablehlo"):
        export(sorting, "onnx", tmp_path)


PAGE = Path(__file__).parents[1] / "docs" / "export.md"
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.slow
@pytest.mark.needs("flatbuffers")
@pytest.mark.parametrize("name", FILES)
def test_code_of_the_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(FILES[name])
    runpy.run_path(str(tmp_path / name))
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "jax.export.deserialize(bytes).call(observation) -> action",
        "[('observation', ['batch', 1, 39])]",
        "(8, 1, 4) True",
    ]
