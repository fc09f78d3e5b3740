"""examples/ray_train.py on local Ray: a worker is killed, and the run ends as one without a failure does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")

_ROOT: Final = Path(__file__).resolve().parents[2]
# One Ray for all runs: starting it takes longer than they do.
_DRIVER: Final = """
import json, ray, ray_train

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
runs = {
    "whole": "--name whole --workers 2 --steps 6",
    "killed": "--name killed --workers 2 --steps 6 --kill-at 3",
    "fewer": "--name killed --workers 1 --steps 8 --partition-size 1",
}
found = {name: ray_train.fit(ray_train.parser.parse_args(line.split())) for name, line in runs.items()}
print("found", json.dumps(found))
"""


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """Losses and norms to the bit, though the run was resumed; then more steps on one worker."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(_ROOT / "src"), str(_ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
        ),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ended = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line = next(line for line in ended.stdout.splitlines() if line.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    whole, killed, fewer = found["whole"], found["killed"], found["fewer"]
    assert (whole["resumed"], killed["resumed"], killed["workers"]) == (False, True, 2)
    assert len(whole["losses"]) == 6 and whole["losses"][-1] < whole["losses"][0]
    assert killed["losses"] == whole["losses"] and killed["norms"] == whole["norms"]
    assert fewer["workers"] == 1 and fewer["losses"][:6] == whole["losses"]
    assert len(fewer["losses"]) == 8
    kept = sorted(path.name for path in (tmp_path / "runs" / "ray" / "killed" / "mics").iterdir())
    assert kept == ["latest", "step-7", "step-8"]
