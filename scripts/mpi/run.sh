#!/usr/bin/env bash
# Trains on several hosts with Open MPI: scripts/mpi/run.sh HOST[,HOST …] CONFIG [options of lockstep train]
# mpirun starts one agent a host. See README.md beside this file.
#
#   LOCKSTEP_COMMAND  the program (default: lockstep, on the path)
#   LOCKSTEP_PORT     where the agents meet on the first host (default: 29400)
#   MPIRUN            mpirun with options of its own (default: mpirun)
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../outcome.sh" || exit 2

if [[ $# -lt 2 || $1 == -* ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
hosts=$1
shift
[[ $hosts =~ ^[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*$ ]] || { echo "run.sh: '$hosts' is no list of hosts such as a,b,c" >&2; exit 2; }
rendezvous=${hosts%%,*}:${LOCKSTEP_PORT:-29400}

# The agents prove to each other that they know this. -x passes a variable on by its name, so it is in no command line.
export LOCKSTEP_TOKEN=${LOCKSTEP_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

as_root=()
[[ $(id -u) -ne 0 ]] || as_root=(--allow-run-as-root) # which mpirun refuses otherwise

# The hosts in the order given, one process on each, not bound to a core: the workers need them all.
# SLURM's variables would contradict Open MPI's, if this runs inside a job.
env -u SLURM_JOB_ID ${MPIRUN:-mpirun} "${as_root[@]}" --host "$hosts" --map-by ppr:1:node --bind-to none \
    -x LOCKSTEP_TOKEN "${LOCKSTEP_COMMAND:-lockstep}" train "$@" --rendezvous "$rendezvous" </dev/null &
mpirun=$!

# On SIGTERM mpirun would kill the agents a second later; SIGUSR1 it passes on, and they save and end.
trap 'kill -USR1 "$mpirun"' INT TERM HUP
outcome_of_all "$mpirun"
exit "$result"
