"""Our own data for the parity tests: what the oracles do today, in the form of the records of the original systems."""

import functools

import numpy as np
import pytest
from helpers import golden

from scripts import record_parity

RECORDED = {own: recorded for recorded, own in golden.OWN.items()}
ELSEWHERE = {"tab_resize_22", "tab_resize_32", "tab_resize_95"}  # tables of q = 11, which no record has


@functools.cache
def made(name: str) -> dict[str, np.ndarray]:
    return record_parity.RECORDS[name]()


def kept(name: str) -> dict[str, np.ndarray]:
    return golden.load(RECORDED[name], "own")


@pytest.mark.parametrize("name", record_parity.RECORDS)
def test_the_script_makes_the_file_again(name: str) -> None:
    """Integers and words exactly; what is rounded or solved for may differ in its last digits on another machine."""
    assert list(made(name)) == list(kept(name))
    for key, array in kept(name).items():
        found = made(name)[key]
        assert (found.dtype, found.shape) == (array.dtype, array.shape), key
        if array.dtype.kind == "f":
            np.testing.assert_allclose(found, array, rtol=1e-6, atol=1e-6, err_msg=key)
        else:
            np.testing.assert_array_equal(found, array, err_msg=key)


@pytest.mark.parametrize("name", record_parity.RECORDS)
def test_the_file_has_the_form_of_the_recorded_one(name: str) -> None:
    recorded = golden.load(RECORDED[name])
    for key in kept(name).keys() - ELSEWHERE:
        own, other = kept(name)[key], recorded[key]
        assert (own.dtype.kind, own.ndim) == (other.dtype.kind, other.ndim), key
        assert own.dtype == other.dtype or own.dtype.kind == "U", key


def test_rare_events_are_among_the_steps_of_snakes() -> None:
    record = kept("parity_snakes")
    present = np.arange(6) < record["n_snakes"][:, None]
    assert (present & (record["len_after"] == 0)).any()  # no room to start again
    eaten = (record["beans_before"] >= 0).sum(1) - record["n_beans_kept"]
    alive = ((record["reward"] > 0) & (record["hit"] == 0)).sum(1)
    assert (eaten > alive).any()  # somebody died with a meal: heads met on a bean
    assert (record["action"] != record["resolved"]).sum() > 100 and record["hit"].sum() > 100
    assert (record["reward"] < 0).sum() > 50 and record["done"].sum() > 10


def test_missions_of_coverage_lose_messages_and_meet() -> None:
    record = kept("parity_coverage")
    together = (record["m01_positions"][:-1, :, None] == record["m01_positions"][:-1, None]).all(-1)
    together &= ~np.eye(4, dtype=bool)
    assert together.any() and record["m01_comm"][together].all()
    assert 0 < record["m01_comm"].mean() < 1
    assert (record["m00_mask"] < record["m00_mask_boundary"]).any()
    for number in (4, 6, 27):
        assert (record[f"mask{number}_final"].sum(1) == 0).any()  # every way is closed
