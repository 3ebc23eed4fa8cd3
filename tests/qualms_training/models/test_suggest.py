"""Whoever mistypes a name is told the right one, and nothing when there is nothing like it."""

from qualms_training.models.suggest import nearest


def test_names_what_was_probably_meant() -> None:
    assert nearest("pol1", ["pool1", "conv9"]) == "; did you mean 'pool1'?"
    assert nearest("pool", ["pool1", "pool2"]) == "; did you mean 'pool2' or 'pool1'?"


def test_ends_the_sentence_when_nothing_is_near() -> None:
    assert nearest("zzz", ["pool1"]) == "."
