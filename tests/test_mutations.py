"""The changes of scripts/check_mutations.py can be made, and the tests that shall notice them are there."""

import pytest

from scripts.check_mutations import MUTATIONS, ROOT, Mutation, fault


def test_every_mutation_can_be_tried() -> None:
    assert [(mutation.text, why) for mutation in MUTATIONS if (why := fault(mutation, ROOT))] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file": "jaxrl/absent.py"}, "there is no file jaxrl/absent.py"),
        ({"old": "no such text"}, "the old text stands 0 times in scripts/check_mutations.py"),
        ({"old": "import "}, "times in scripts/check_mutations.py"),
        ({"tests": "tests/test_mutations.py tests/test_absent.py"}, "there is no test file tests/test_absent.py"),
        ({"tests": "tests/test_mutations.py::test_absent"}, "there is no test test_absent in tests/test_mutations.py"),
        ({"tests": ""}, "no test is named"),
    ],
)
def test_what_cannot_be_tried_is_told(change: dict[str, str], words: str) -> None:
    whole = Mutation("topic", "text", "scripts/check_mutations.py", "ROOT = Path(", "", "tests/test_mutations.py")
    assert fault(whole, ROOT) == ""
    assert words in fault(whole._replace(**change), ROOT)
