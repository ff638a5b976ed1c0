#!/usr/bin/env bash
# Trains in an environment of its own, made on the first call: bash scripts/train.sh [CONFIG] [options of lockstep train]
#
# Without CONFIG it trains configs/digits_vit.toml, and then, unless told otherwise, into a run directory of its own
# (runs/digits_vit, runs/digits_vit-2, …), so that the same command can be repeated; with --resume --run-dir RUN it goes on
# with that run's own settings. See scripts/environment.sh for the variables that choose the Python and the extras.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment run
if [[ $# -gt 0 && $1 != -* ]]; then
    exec "$venv/bin/lockstep" train "$@"
fi

directory=runs/digits_vit
for ((number = 2; ; number++)); do
    [[ -e $directory ]] || break
    directory=runs/digits_vit-$number
done
case " $* " in
    *" --help "* | *" --run-dir"* | *" --resume "* | *" --overwrite "* | *run.name*) own=() ;;
    *) own=(--run-dir "$directory") ;;
esac

run_dir() { # prints what --run-dir gives
    while [[ $# -gt 0 ]]; do
        case $1 in
            --run-dir) printf '%s' "${2-}" && return ;;
            --run-dir=*) printf '%s' "${1#*=}" && return ;;
        esac
        shift
    done
}

config=("$root/configs/digits_vit.toml")
[[ " $* " == *" --resume "* && -f $(run_dir "$@")/config.toml ]] && config=()
exec "$venv/bin/lockstep" train "${config[@]}" "${own[@]}" "$@"
