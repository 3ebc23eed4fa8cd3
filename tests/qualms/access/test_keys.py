"""Lines of the file of keys: what is accepted, and that errors never repeat what a line contains."""

import pytest

from qualms.access.keys import MAX_KEYS, SCOPES, TOKEN_PREFIX, Key, KeysError, new_token, parse_keys, token_digest

DIGEST = "ab" * 32
OTHER = "cd" * 32


def test_a_line_has_a_name_a_digest_and_limits() -> None:
    (key,) = parse_keys(f"app sha256:{DIGEST} rate=0.5 concurrency=3 only=metrics,predict", "keys")
    assert key == Key("app", bytes.fromhex(DIGEST), 0.5, 3, ("predict", "metrics"))


def test_empty_lines_and_comments_are_skipped() -> None:
    assert [key.name for key in parse_keys(f"# all\n\n  a sha256:{DIGEST}\r\n#b sha256:{OTHER}\n", "keys")] == ["a"]


def test_a_key_without_options_has_no_limits_and_may_be_used_for_everything() -> None:
    (key,) = parse_keys(f"app sha256:{DIGEST}", "keys")
    assert (key.rate, key.concurrency, key.only) == (None, None, SCOPES)


@pytest.mark.parametrize(
    "key",
    [
        Key("a", bytes(32)),
        Key("A.b-c_9", bytes.fromhex(DIGEST), rate=0.125, concurrency=7, only=("read",)),
        Key("a", bytes.fromhex(OTHER), rate=1e6),
    ],
)
def test_a_written_line_is_read_as_the_same_key(key: Key) -> None:
    assert parse_keys(key.line(), "keys") == [key]


@pytest.mark.parametrize(
    "line",
    [
        "hunter2hunter2",
        "app hunter2hunter2",
        "app sha256:hunter2hunter2",
        f"app sha256:{DIGEST.upper()} hunter2hunter2",
        f"app sha256:{DIGEST} hunter2hunter2",
        f"app sha256:{DIGEST} rate=hunter2hunter2",
        f"app sha256:{DIGEST} concurrency=hunter2hunter2",
        f"app sha256:{DIGEST} only=hunter2hunter2",
        f"app sha256:{DIGEST} rate=1 rate=2hunter2hunter2",
        f"hünter2hunter2 sha256:{DIGEST}",
    ],
)
def test_an_invalid_line_is_named_by_its_number_and_not_repeated(line: str) -> None:
    with pytest.raises(KeysError, match=r"^Line 2 of /keys is not accepted: .*\.$") as error:
        parse_keys(f"# first\n{line}\n", "/keys")
    assert "hunter2" not in str(error.value)
    assert DIGEST not in str(error.value)


@pytest.mark.parametrize("option", ["rate=0", "rate=-1", "rate=nan", "rate=inf", "rate=1e7", "concurrency=0", "only="])
def test_limits_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(KeysError, match=f"{option.partition('=')[0]}= should be"):
        parse_keys(f"app sha256:{DIGEST} {option}", "keys")


def test_names_and_digests_are_unique() -> None:
    with pytest.raises(KeysError, match="Line 2 of keys is not accepted: the name a is used by an earlier line"):
        parse_keys(f"a sha256:{DIGEST}\na sha256:{OTHER}", "keys")
    with pytest.raises(KeysError, match="an earlier line has the same digest"):
        parse_keys(f"a sha256:{DIGEST}\nb sha256:{DIGEST}", "keys")


def test_the_number_of_keys_is_limited() -> None:
    lines = [f"k{number} sha256:{number:064x}" for number in range(MAX_KEYS + 1)]
    assert len(parse_keys("\n".join(lines[:-1]), "keys")) == MAX_KEYS
    with pytest.raises(KeysError, match="at most 1,000 keys"):
        parse_keys("\n".join(lines), "keys")


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a" * 65, "ä", 'a"b', "a\n"])
def test_names_are_safe_for_logs_and_metrics(name: str) -> None:
    with pytest.raises(KeysError, match="name"):
        Key(name, bytes(32))


def test_tokens_are_random_and_long() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == len(TOKEN_PREFIX) + 43 for token in tokens)
    assert len({token_digest(token.encode()) for token in tokens}) == 100
