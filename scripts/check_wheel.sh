#!/usr/bin/env bash
# Build the sdist and from it the wheel, install the wheel into a fresh environment and use it:
# scripts/check_wheel.sh [PYTHON]
#
# Nothing is downloaded. PYTHON (default python3) has torch and the dev extra; the fresh environment sees its
# packages, but not a mics that is installed there in editable form.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${1:-python3}") || { echo "package: error: no interpreter ${1:-python3}" >&2; exit 1; }
unset PYTHONPATH  # the sources must not stand in for the wheel
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf 'package: %s\n' "$*" >&2; }
fail() { printf 'package: error: %s\n' "$*" >&2; exit 1; }

say "building"
"$python" -m build --no-isolation --outdir "$work/dist" . > "$work/build.log" 2>&1 || {
    cat "$work/build.log" >&2
    fail "python -m build failed, as above; pip install '.[dev]' brings what it needs"
}
wheel=("$work"/dist/*.whl)
[[ -f ${wheel[0]} && ${#wheel[@]} == 1 && -f $(echo "$work"/dist/*.tar.gz) ]] || fail \
    "expected one wheel and one sdist, found: $(ls "$work/dist")"

say "installing ${wheel[0]##*/}"
"$python" -m venv --without-pip "$work/env"
env_python=$work/env/bin/python
packages='import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")'
"$python" -c "$packages" > "$("$env_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"
"$python" -m pip --python "$env_python" install --disable-pip-version-check --no-deps --no-index --ignore-installed \
    -q "${wheel[0]}"

say "using it"
cd "$work"
cat > smoke.py <<'PY'
"""Shard a small model on one process and take a step; the wheel has what it must have."""

import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
import torch.distributed as dist

import mics

home = Path(mics.__file__).resolve().parent
assert home.is_relative_to(Path(sys.prefix).resolve()), f"not the wheel: {home}"
for name in ("py.typed", "train/fables.txt"):
    assert (home / name).is_file(), f"not in the wheel: {name}"
found = distribution("mics-torch")
assert found.version == mics.__version__, (found.version, mics.__version__)
assert {"cli", "plot", "docs", "dev"} <= set(found.metadata.get_all("Provides-Extra"))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
mics.shard(model, partition_size=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
batch, losses = torch.randn(16, 8), []
for _ in range(2):
    for rows in mics.microsteps(model, [batch]):
        loss = model(rows).square().mean()
        loss.backward()
    mics.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[1] < losses[0], losses
dist.destroy_process_group()
print(mics.__version__)
PY
version=$("$env_python" smoke.py)
mics=$work/env/bin/mics
[[ $("$mics" --version) == "mics $version" ]] || fail "expected mics $version of mics --version"
help=$("$mics" --help)
for command in bench checkpoint emulate plan train; do
    grep -q "^  $command " <<< "$help" || fail "expected $command in mics --help, found: $help"
done
say "ok: ${wheel[0]##*/} trains, mics --version and mics --help answer (${SECONDS} s)"
