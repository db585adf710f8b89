"""How many devices a run uses."""

import jax

from jaxrl.common.errors import UsageError
from jaxrl.rl.data_parallel import largest_divisor
from jaxrl.runtime import hosts


def choose_devices(requested: int, num_envs: int, shards: int) -> tuple[int, str | None]:
    """Return the number of devices to use, equal on every host, and a warning if some are left out.

    `requested` is the number of devices on every host, 0 for all; `num_envs` and `shards` are of the whole run.

    Raises UsageError: more requested than there are, or a requested number that cannot share the batch.
    """
    local = _count_local_devices(requested)
    host_count = jax.process_count()
    used = max((d for d in range(1, local + 1) if shards % (d * host_count) == 0), default=0)
    if used == local:
        return used * host_count, None
    fitting = -(-num_envs // 8) * 8
    remedy = "a minibatch that 8 divides and no --logical_shards" if fitting == num_envs else f"--num_envs {fitting}"
    devices = f"{local} devices" if host_count == 1 else f"{host_count} hosts of {local} devices"
    cut = f"{num_envs} environments are cut into {shards} logical shards, which {devices} cannot share evenly"
    if not used:
        others = f", or {remedy} with 2, 4 or 8 hosts" if shards < 8 else ""
        raise UsageError(f"{cut}: start {_power_of_two(min(host_count, shards))} of them{others}")
    if requested:
        raise UsageError(f"{cut}: use --devices {used}, or {remedy} with 1, 2, 4 or 8 devices")
    better = _power_of_two(min(local, 8 // host_count))
    advice = f"; {remedy} would let {better} be used" if better > used else ""
    on_each = " on each" if host_count > 1 else ""
    return used * host_count, f"{cut}: only {used} of them are used{on_each}{advice}"


def _power_of_two(limit: int) -> int:
    """Return the largest power of two that is at most `limit`."""
    return 1 << (limit.bit_length() - 1)


def choose_trial_devices(requested: int, trials: int) -> int:
    """Return the number of devices that share these trials. Raises UsageError."""
    if hosts.count_hosts() > 1:
        raise UsageError("num_seeds and sweep need a single host: start one run for each host, each with its own seeds")
    return largest_divisor(trials, _count_local_devices(requested))


def _count_local_devices(requested: int) -> int:
    """Return the number of devices of a host to use, all if 0 are requested. Raises UsageError: there are fewer."""
    present = jax.local_device_count()
    if requested > present:
        raise UsageError(f"--devices {requested}, but there are only {present}: choose {present} or fewer")
    return requested or present
