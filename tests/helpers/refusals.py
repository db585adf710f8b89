"""Commands that refuse what they are asked for: the exit code, and one sentence on stderr."""

import importlib
from typing import Any

import pytest


def refuse(capsys: pytest.CaptureFixture[str], command: str, *words: Any, code: int = 2) -> str:
    """Return the sentence with which a command ends, such as "train --algo koma" and more words.

    Warnings of damaged checkpoints may come before it; a usage error (code 2) prints nothing else.
    """
    verb, *first = command.split()
    capsys.readouterr()
    assert importlib.import_module(f"jaxrl.cli.{verb}").main([*first, *map(str, words)]) == code
    printed, said = capsys.readouterr()
    sentences = [line for line in said.splitlines() if not line.startswith("warning: checkpoint")]
    assert len(sentences) == 1 and sentences[0].startswith("error: "), said
    assert len(sentences[0]) <= 1000
    assert code != 2 or not printed
    return sentences[0]
