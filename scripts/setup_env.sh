#!/usr/bin/env bash
# Make an environment that can run mics: scripts/setup_env.sh PYTHON ENV_DIR [TORCH_VERSION]
#
# A torch that is already there and in range is kept: on a GPU machine it is the one built for its driver. With
# TORCH_VERSION the environment has that one, whatever else is there.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
env_dir=$2
wanted_torch=${3:-}
torch_version=${wanted_torch:-2.13.0}  # installed when there is none
first_torch=2.11 last_torch=2.15       # keep as in pyproject.toml

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# Exit 0 when the interpreter can import a torch in range (or the wanted one), 3 when another, 1 when it has none.
torch_in_range() {
    "$1" - "$first_torch" "$last_torch" "$wanted_torch" <<'PY' 2>/dev/null
import sys
try:
    import torch
except Exception:
    sys.exit(1)
first, last, wanted = sys.argv[1:]
found = torch.__version__.split("+")[0]
numbers = [[int(part) for part in version.split(".")[:2]] for version in (first, found, last)]
sys.exit(0 if numbers == sorted(numbers) and wanted in ("", found) else 3)
PY
}

# Say how long something takes, until it is over: every second in a terminal, every five seconds elsewhere.
tick() {
    local began=$SECONDS pause=5
    [[ -t 2 ]] && pause=1
    while sleep $pause >/dev/null 2>&1; do
        if [[ -t 2 ]]; then
            printf '\rsetup: %s: %d s' "$1" $((SECONDS - began)) >&2
        else
            say "$1: $((SECONDS - began)) s"
        fi
    done
}

ticker=
stop_ticking() {
    [[ -n $ticker ]] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
}
trap stop_ticking EXIT

# pip_install TEXT ARGUMENTS: pip itself says nothing for minutes.
pip_install() {
    local text=$1 status=0
    shift
    say "$text"
    tick "$text" &
    ticker=$!
    "$env_dir/bin/python" -m pip install --disable-pip-version-check -qq "$@" || status=$?
    stop_ticking
    [[ $status == 0 ]] || fail \
        "pip could not install: $*. Its own message is above; if it speaks of connections, check the network" \
        "or the package index pip is configured for, then run the same make command again."
}

make_venv() {
    "$python" -m venv "$@" "$env_dir" || fail \
        "'$python -m venv' failed. On Debian and Ubuntu install python3-venv first; then remove $env_dir and retry."
}

# An interpreter that is itself in a virtual environment hides its packages from the new one: point there.
see_packages_of() {
    torch_in_range "$env_dir/bin/python" && return
    local where='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$1" -c "$where" > "$("$env_dir/bin/python" -c "$where")/packages_of_parent.pth"
}

printf '%s\n' "$first_torch" "$torch_version" "$last_torch.999" | sort -VC || fail \
    "expected a torch from $first_torch to $last_torch, found TORCH=$torch_version"

if [[ ! -x $env_dir/bin/python ]]; then
    command -v "$python" >/dev/null || fail \
        "expected a Python interpreter called '$python', found none. Install Python 3.11 or newer, or name one:" \
        "make PYTHON=/path/to/python3.11"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
        "expected Python 3.11 or newer, found $("$python" --version 2>&1). Name a newer one: make PYTHON=python3.11"
    say "creating $env_dir"
    if torch_in_range "$python"; then
        say "using the torch that $python already has"
        make_venv --system-site-packages
        see_packages_of "$python"
    else
        make_venv
    fi
fi
"$env_dir/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "expected Python 3.11 or newer in $env_dir, found $("$env_dir/bin/python" --version 2>&1)." \
    "Deactivate or remove that environment and retry."

status=0
torch_in_range "$env_dir/bin/python" || status=$?
case $status in
    0) ;;
    3) fail "expected torch ${wanted_torch:-$first_torch to $last_torch} in $env_dir, found" \
            "$("$env_dir/bin/python" -c 'import torch; print(torch.__version__)'). It is yours, so it is not replaced:" \
            "deactivate or remove that environment to get a fresh one, or install torch==$torch_version yourself." ;;
    *) # Exact and on its own: asked for a range, pip may pick a build with gigabytes of GPU libraries.
       pip_install "installing torch $torch_version (the one long download)" "torch==$torch_version" ;;
esac

# Named again, so that pip keeps this torch whatever else it has to try.
torch_here=$("$env_dir/bin/python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
pip_install "installing mics and its development tools" --editable '.[dev]' "torch==$torch_here"
say "ready in $env_dir"
