# Sourced by mpi/run.sh and ssh/run.sh: how what they started has ended, and what that makes of the whole.

code=0
result=0

outcome() { # PID: sets code to its exit code, however often a signal interrupts the wait
    local again
    while true; do
        wait "$1"
        code=$?
        kill -0 "$1" 2>/dev/null || break
    done
    wait "$1" 2>/dev/null # it may have ended just after an interruption; 127: it had not
    again=$?
    ((again == 127)) || code=$again
}

outcome_of_all() { # PID …: sets result to the first exit code that is not 0, in the order of the hosts
    local pid
    for pid; do
        outcome "$pid"
        ((result != 0)) || result=$code # the agents agree on theirs; only one that was lost differs
    done
}
