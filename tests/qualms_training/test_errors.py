from qualms_training.errors import did_you_mean


def test_similar_names_are_suggested() -> None:
    assert did_you_mean("pol1", ["pool1", "conv9"]) == "; did you mean 'pool1'?"
    assert did_you_mean("pool", ["pool1", "pool2"]) == "; did you mean 'pool2' or 'pool1'?"


def test_without_a_similar_name_the_sentence_just_ends() -> None:
    assert did_you_mean("zzz", ["pool1"]) == "."
