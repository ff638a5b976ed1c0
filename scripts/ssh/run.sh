#!/usr/bin/env bash
# Trains on bare hosts over ssh: scripts/ssh/run.sh HOST[,HOST …] CONFIG [options of lockstep train]
# ssh starts one agent a host, in this directory. See README.md beside this file.
#
#   LOCKSTEP_COMMAND  the program on every host (default: lockstep)
#   LOCKSTEP_PORT     where the agents meet on the first host (default: 29400)
#   SSH               ssh with options of its own (default: ssh -o BatchMode=yes)
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../outcome.sh" || exit 2

if [[ $# -lt 2 || ! $1 =~ ^[A-Za-z0-9@._-]+(,[A-Za-z0-9@._-]+)*$ || $1 == -* ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
IFS=, read -ra hosts <<<"$1"
shift
rendezvous=${hosts[0]##*@}:${LOCKSTEP_PORT:-29400}

# The agents prove to each other that they know this. It goes through ssh's standard input: it is in no command line.
token=${LOCKSTEP_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}

# On the host: when the connection ends, `cat` does, and the agent is asked to end too.
# shellcheck disable=SC2016
remote='cd -- "$0" && read -r LOCKSTEP_TOKEN && export LOCKSTEP_TOKEN || exit 2
exec 3<&0
"$@" </dev/null 3<&- &
{ cat <&3 >/dev/null; kill -TERM $!; } 2>/dev/null & exec 3<&-; wait %1'

inputs=() agents=()
for index in "${!hosts[@]}"; do
    argv=(bash -c "$remote" "$PWD" "${LOCKSTEP_COMMAND:-lockstep}" train "$@"
        --num-hosts "${#hosts[@]}" --host-index "$index" --rendezvous "$rendezvous")
    # Only this script holds the writing ends: when it ends, however it does, all connections do.
    exec {input}> >(
        for other in "${inputs[@]}"; do exec {other}>&-; done
        exec ${SSH:-ssh -o BatchMode=yes} "${hosts[index]}" "$(printf '%q ' "${argv[@]}")"
    )
    agents+=($!) inputs+=("$input")
    printf '%s\n' "$token" >&"$input"
done

trap 'for input in "${inputs[@]}"; do exec {input}>&-; done; inputs=()' INT TERM HUP
outcome_of_all "${agents[@]}"
exit "$result"
