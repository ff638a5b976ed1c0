#!/usr/bin/env bash
# Checks everything: bash scripts/test.sh [--slow] [--no-lint] [--wheel | --lowest] [pytest arguments]
#
#   (no option)  ruff, the type checker, then the tests but the slow ones; pytest arguments select tests
#   --slow       the slow tests as well
#   --no-lint    the tests alone
#   --wheel      the tests alone, against the built and installed wheel, with the checkout out of reach
#   --lowest     the tests alone, against the oldest versions that pyproject.toml allows
#
# Files of tests run side by side, one a core; -n 0 runs all in one process, as --pdb needs. The slowest are listed.
# Ends at the first stage that fails, and names it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

mode=checkout lint=yes selection=(-m "not slow")
while [[ $# -gt 0 ]]; do
    case $1 in
        --slow) selection=() ;;
        --no-lint) lint=no ;;
        --wheel | --lowest) mode=${1#--} lint=no ;;
        *) break ;;
    esac
    shift
done

current=options work=
finish() {
    local code=$?
    [[ -z $work ]] || rm -rf "$work"
    [[ $code -eq 0 ]] || say "test.sh: failed at: $current (exit code $code)"
}
trap finish EXIT

stage() { # NAME COMMAND …
    current=$1
    say "== $current"
    "${@:2}"
}

run_pytest() { # PYTHON ARGUMENTS …
    "$1" -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations 20 "${selection[@]}" "${@:2}"
}

install_wheel() { # into an environment that borrows the dependencies of $venv, but not its link to the checkout
    "$venv/bin/python" -m build --outdir "$work/dist" "$root" >"$work/log" 2>&1 || { cat "$work/log"; return 1; }
    "$venv/bin/python" -m venv --without-pip "$work/venv"
    local site
    site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$venv/bin/python" -m pip --python "$work/venv/bin/python" install --quiet --no-deps "$work"/dist/*.whl
    "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/borrowed.pth"
}

test_wheel() { # from a copy of the tests; LOCKSTEP_CHECKOUT tells them where the files are that no wheel holds
    cp -R "$root/tests" "$root/pyproject.toml" "$work"
    [[ $# -gt 0 ]] || set -- tests --pyargs trainer models
    cd "$work"
    export LOCKSTEP_CHECKOUT=$root
    run_pytest "$work/venv/bin/python" "$@"
}

install_lowest() {
    "$venv/bin/python" "$root/scripts/lowest.py" "$root/pyproject.toml" >"$work/lowest.txt"
    "$venv/bin/python" -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --no-input --constraint "$work/lowest.txt" --editable "$root[dev]"
}

stage environment make_environment dev
cd "$root"
if [[ $lint == yes ]]; then
    stage "ruff check" "$venv/bin/ruff" check
    stage "ruff format" "$venv/bin/ruff" format --check
    stage "type checker" "$venv/bin/basedpyright" --pythonpath "$venv/bin/python"
fi
if [[ $mode == checkout ]]; then
    stage tests run_pytest "$venv/bin/python" "$@"
else
    work=$(mktemp -d)
    stage "install ($mode)" "install_$mode"
    case $mode in
        wheel) stage "tests (wheel)" test_wheel "$@" ;;
        lowest) stage "tests (lowest versions)" run_pytest "$work/venv/bin/python" "$@" ;;
    esac
fi
say "test.sh: all passed"
