"""What is needed without any extra, and what a call says that lacks one."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

import mics
from mics.cli import COMMANDS, main
from mics.cost.clusters import find_cluster
from mics.utils.extras import PACKAGES, require

_PYPROJECT: Final = Path(__file__).parent.parent / "pyproject.toml"
_IMPORTED_AS: Final = {"pyyaml": "yaml"}
_NOT_IN_DEV: Final = ("torchtitan", "ray", "bitsandbytes", "gcs")  # large, or slow to start

# Everything that is public, and training with checkpoints. None in sys.modules: not installed.
_WITHOUT_EXTRAS: Final = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
import mics, torch, torch.distributed as dist
for name in mics.__all__:
    getattr(mics, name)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = mics.shard(torch.nn.Linear(8, 8), partition_size=1)
optimizer = torch.optim.AdamW(model.parameters())
for batch in mics.microsteps(model, [torch.ones(2, 8)]):
    model(batch).sum().backward()
optimizer.step()
mics.save(sys.argv[1], model, optimizer, {"step": 1}, step=1)
print(mics.load(sys.argv[1], model, optimizer, {"step": 0})["step"])
dist.destroy_process_group()
"""


def _packages(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\s<>=!\[;]", each)[0].lower() for each in requirements}
    return {_IMPORTED_AS.get(name, name) for name in names}


@pytest.mark.full
def test_the_library_needs_no_extra(tmp_path: Path) -> None:
    """Shard, train, save and load, and every public name loads, in a process without any extra's packages."""
    extras = [package for packages in PACKAGES.values() for package in packages]
    command = [sys.executable, "-c", _WITHOUT_EXTRAS, str(tmp_path), *extras]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "1\n"), found.stderr


def test_extras_are_as_declared() -> None:
    """The packages that are asked for are those that pyproject.toml installs; dev has all but four."""
    project = tomllib.loads(_PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        assert _packages(extras[extra]) == set(packages)
    assert f"mics-torch[{','.join(extra for extra in PACKAGES if extra not in _NOT_IN_DEV)}]" in extras["dev"]
    assert _packages(project["dependencies"]) == {"torch", "numpy", "safetensors", "xxhash"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_its_extra_says_what_to_type(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and exit code 2."""
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main([command, "--help"]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"mics {command}: error: mics {command} needs tyro, found none; type: pip install 'mics-torch[cli]'\n"
    )


_PLAN: Final = ["plan", "--model", "gpt-3.6b", "--cluster", "p4d.24xlarge:2", "--global-batch", "64"]


@pytest.mark.parametrize(
    "args",
    [
        ["train"],
        ["bench", "--out", "{}/bench"],
        ["emulate", "--out", "{}/emulate"],
        [*_PLAN, "--html", "{}/plan.html"],
    ],
    ids=lambda args: args[0],
)
def test_a_picture_without_matplotlib_says_what_to_type(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2, before anything runs or is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delenv("RANK", raising=False)
    assert main([arg.format(tmp_path) for arg in args]) == 2
    error = capsys.readouterr().err
    assert error.endswith("needs matplotlib, found none; type: pip install 'mics-torch[plot]'\n")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_file_without_yaml_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library call raises what callers catch: an ImportError, and an error of mics."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"my.yaml needs yaml.*pip install 'mics-torch\[cli\]'") as caught:
        find_cluster("my.yaml:4")
    assert isinstance(caught.value, mics.SettingsError)
    assert find_cluster("p4d.24xlarge:4").num_nodes == 4


def test_what_is_there_is_not_complained_about() -> None:
    require("cli", "this test")
    require("plot", "this test")
