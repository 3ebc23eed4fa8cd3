"""Write the dashboards' JSON: change a panel in doubt.py or service.py, run this, and commit both.

python -m docker.grafana.build
"""

import json
from pathlib import Path

from docker.grafana import doubt, service

FOLDER = Path(__file__).parent / "dashboards"


def texts() -> dict[str, str]:
    """Each dashboard's file name and text."""
    made = {"doubt.json": doubt.build(), "service.json": service.build()}
    return {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in made.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
