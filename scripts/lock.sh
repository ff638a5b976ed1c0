#!/usr/bin/env bash
# Renews scripts/locks/: the newest versions that fit together now, for the oldest and the newest supported Python.
# bash scripts/lock.sh PYTHON3.11 PYTHON3.13; then run the tests under both, and commit.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

[[ $# -gt 0 ]] || { say "bash scripts/lock.sh PYTHON …: name the interpreters, for example python3.11 python3.13"; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for python in "$@"; do
    is_fit "$python" || { say "$python does not run, is older than 3.11, or lacks the modules venv and ensurepip."; exit 2; }
    version=$(minor_version "$python")
    "$python" -m venv --clear "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --editable "$root[dev]"
    {
        printf '# Tested together under Python %s, all extras but cuda. Renewed by scripts/lock.sh.\n' "$version"
        "$work/venv/bin/python" -m pip list --format=freeze --disable-pip-version-check \
            --exclude-editable --exclude pip
    } >"$work/lock.txt"
    cp "$work/lock.txt" "$root/scripts/locks/py${version//./}.txt"
    say "wrote scripts/locks/py${version//./}.txt"
done
