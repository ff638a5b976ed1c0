# Sourced by the other scripts: finds a Python, and makes virtual environments that are ready at once the second time.
#
#   PYTHON           the interpreter to use (default: the first fit one of python3, python3.11, python3.12, …)
#   LOCKSTEP_VENV    where the environment is (default: .venv in the checkout)
#   LOCKSTEP_EXTRAS  further extras to install, for example cuda

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LOCKSTEP_VENV:-$root/.venv}

say() { printf '%s\n' "$*" >&2; }

is_fit() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() { # prints an interpreter that can make the environment, or says what is missing
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_fit "$PYTHON" && printf '%s\n' "$PYTHON" && return
        say "PYTHON=$PYTHON does not run, is older than 3.11, or lacks the modules venv and ensurepip."
        return 2
    fi
    for candidate in python3 python3.11 python3.12 python3.13 python3.14; do
        is_fit "$candidate" && printf '%s\n' "$candidate" && return
    done
    say "No Python >= 3.11 with the modules venv and ensurepip was found. Install one (Debian: python3 and python3-venv),"
    say "or name it: PYTHON=/path/to/python3.12 bash $0"
    return 2
}

minor_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

lock_file() { # the versions that were tested together, for this interpreter
    case $(minor_version "$1") in
        3.11) printf '%s\n' "$root/scripts/locks/py311.txt" ;;
        *) printf '%s\n' "$root/scripts/locks/py313.txt" ;;
    esac
}

wanted() { # what the environment must have been made from: a change in any of these renews it
    cat "$root/pyproject.toml" "$root"/scripts/locks/*.txt
    printf '%s\n' "$root" "${LOCKSTEP_EXTRAS:-}"
    [[ -z ${PYTHON:-} ]] || minor_version "$PYTHON"
}

is_ready() { # EXTRA: the environment has it, and still runs
    [[ $(cat "$venv/ready-$1" 2>/dev/null) == "$2" ]] && "$venv/bin/python" -c '' 2>/dev/null
}

install() { # EXTRA STAMP
    local python extras
    python=$(find_python) || return
    ! is_ready "$1" "$2" || return 0 # another call was faster
    if ! "$venv/bin/python" -c '' 2>/dev/null || [[ $(minor_version "$venv/bin/python") != $(minor_version "$python") ]]; then
        say "Making the environment $venv (once; some minutes) …"
        "$python" -m venv --clear "$venv" || return
    else
        say "Renewing the environment $venv …"
    fi
    rm -f "$venv"/ready-*
    extras=${LOCKSTEP_EXTRAS:-}
    [[ $1 == run ]] || extras=$1${extras:+,$extras}
    "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
        --constraint "$(lock_file "$venv/bin/python")" --editable "$root${extras:+[$extras]}" || return
    printf '%s\n' "$2" >"$venv/ready-run"
    printf '%s\n' "$2" >"$venv/ready-$1"
}

make_environment() { # EXTRA: run (just what a run needs) or dev (for the tests as well)
    local stamp
    stamp=$(wanted | sha256sum)
    ! is_ready "$1" "$stamp" || return 0
    # The checkout itself is the lock, so that two calls at once do not install into one environment.
    (
        ! command -v flock >/dev/null || flock 9
        install "$1" "$stamp"
    ) 9<"$root"
}
