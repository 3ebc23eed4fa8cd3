"""Generate the dashboards' JSON files. After changing uncertainty.py or service.py, run this and commit the result.

python -m docker.grafana.build
"""

import json
from pathlib import Path

from docker.grafana import service, uncertainty

FOLDER = Path(__file__).parent / "dashboards"


def texts() -> dict[str, str]:
    """Return the JSON text of each dashboard by file name."""
    dashboards = {"service.json": service.build(), "uncertainty.json": uncertainty.build()}
    return {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in dashboards.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
