"""All attacks by name."""

from difflib import get_close_matches

from qualms.bench.attacks import (  # noqa: F401  (importing them registers attacks)
    bodies,
    connections,
    heads,
    hostile_files,
    images,
)
from qualms.bench.attacks.definition import ATTACKS, Attack
from qualms.bench.servers.processes import BenchError


def find_attacks(names: list[str]) -> list[Attack]:
    """The attacks with these names; `all` stands for all of them."""
    if "all" in names:
        return list(ATTACKS.values())
    for name in names:
        if name not in ATTACKS:
            similar = get_close_matches(name, ATTACKS, 1, 0.0)[0]
            raise BenchError(
                f"There is no attack {name!r}; the most similar one is {similar!r}, and `--attack list` prints all of them."
            )
    return [ATTACKS[name] for name in dict.fromkeys(names)]
