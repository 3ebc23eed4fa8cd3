"""Act on each verdict – accept, abstain, or send to a person: python act_on_flag.py URL FILE...

- accept: the image is like the training data, and the prediction has the guaranteed error rate.
- abstain: the image is unlike the training data, so no class is an answer.
- person: the image is like the training data, but the class is uncertain, or no error rate can be guaranteed.
"""

import sys
from typing import Literal

import qualms


def action(result: qualms.Result) -> Literal["accept", "abstain", "person"]:
    """The action for one result. A flagged image is never accepted; `trust.accept` is None if there is no guarantee."""
    if result.ood.flag:
        return "abstain"
    return "accept" if result.trust.accept else "person"


def main(url: str, *files: str) -> None:
    """Print the action for each file, with its reason."""
    with qualms.Client(url) as client:
        for file, result in zip(files, client.stream(files, target_risk=0.01, coverage=0.95), strict=True):
            chosen = action(result)
            if chosen == "accept":
                print(file, chosen, result.prediction.label)
            elif chosen == "abstain":
                print(file, chosen, f"p-value {result.ood.p_value:.4f}")
            else:
                likely = result.prediction_set.labels if result.prediction_set else []
                print(file, chosen, "likely classes:", " ".join(likely))


if __name__ == "__main__":
    main(*sys.argv[1:])
