"""Print the class, the OOD flag and the trust verdict of image files: python predict.py URL FILE..."""

import sys

import qualms


def main(url: str, *files: str) -> None:
    """Send all files in one call; the client splits it into requests and keeps the order."""
    with qualms.Client(url) as client:
        for file, result in zip(files, client.predict(files), strict=True):
            print(file, "class", result.prediction.label, "flag", result.ood.flag, "accept", result.trust.accept)


if __name__ == "__main__":
    main(*sys.argv[1:])
