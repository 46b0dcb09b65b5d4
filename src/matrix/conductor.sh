# Starts each job once the one that it stands on is done. Whatever it goes by it asks the cluster for each time: killed at
# any moment and started again, it goes on. It ends well only if all jobs are done.
#   SELF      the job that this is
#   SELECTOR  the labels that all of these jobs have
#   JOBS      JOB:AFTER for each, those that others stand on before them
#   PAUSE     seconds between two looks
set -u
trap 'exit 143' TERM
fields='{range .items[*]}{.metadata.name} {.spec.suspend}{range .status.conditions[?(@.status=="True")]} {.type}:{.reason}{end}{"\n"}{end}'
# Lines that have been said.
said='
'
say() { # LINE: once
    case $said in *"
$1
"*) return ;; esac
    echo "$1"
    said="$said$1
"
}
patch() { # JOB SPEC
    kubectl patch job "$1" --type=merge --patch "{\"spec\":{$2}}" >/dev/null
}
# Reads what the cluster says of jobs into ` JOB=STATE JOB=STATE `.
read_states() {
    states=' '
    while read -r job suspended conditions; do
        case " $conditions" in
        *' Complete:'*) state=done ;;
        *' Failed:'*)
            state=${conditions#*Failed:}
            state=failed:${state%% *}
            ;;
        *)
            state=runs
            [ "$suspended" != true ] || state=waits
            ;;
        esac
        states="$states$job=$state "
    done
}
state_of() { # JOB: sets `state`
    case $states in
    *" $1="*)
        state=${states#*" $1="}
        state=${state%% *}
        ;;
    *) state=gone ;;
    esac
}
# Looks at each job once; sets how many of them are done, went wrong, are never run, and are still to come.
turn() {
    done=0 failed=0 unrun=0 left=0 unrun_jobs=' '
    for pair in $JOBS; do
        job=${pair%%:*} after=${pair#*:}
        state_of "$job"
        case $state in
        done)
            done=$((done + 1))
            say "$job: done"
            ;;
        failed:*)
            failed=$((failed + 1))
            say "$job: failed (${state#failed:}); kubectl logs job/$job"
            ;;
        gone)
            failed=$((failed + 1))
            say "$job: deleted"
            ;;
        runs)
            left=$((left + 1))
            say "$job: runs"
            ;;
        waits)
            [ -z "$after" ] || state_of "$after"
            case $unrun_jobs in *" $after "*) state=unrun ;; esac
            case $state in
            failed:* | gone | unrun)
                unrun=$((unrun + 1)) unrun_jobs="$unrun_jobs$job "
                say "$job: not run, for $after is not done"
                ;;
            *)
                left=$((left + 1))
                # What could not be started is tried again at the next look.
                if [ "$state" = done ] && patch "$job" '"suspend":false'; then
                    say "$job: started, for $after is done"
                fi
                ;;
            esac
            ;;
        esac
    done
}
unanswered=0
while :; do
    if listed=$(kubectl get jobs --request-timeout=30s --selector="$SELECTOR" --output="jsonpath=$fields"); then
        unanswered=0
        read_states <<END
$listed
END
        turn
        [ "$left" != 0 ] || break
    else
        unanswered=$((unanswered + 1))
        # Another one may have more luck, on another node.
        [ "$unanswered" -lt 12 ] || exit 4
    fi
    sleep "$PAUSE"
done
echo "$done done, $failed failed, $unrun not run"
[ "$failed$unrun" != 00 ] || exit 0
# It is to fail, not to be tried again.
patch "$SELF" '"backoffLimit":0'
exit 5
