# Shell functions of the runbooks; docs/runbooks/README.md says which variables they need.

# All metrics of the router at $URL.
metrics() {
    curl -sf -m 10 ${KVRELAY_OPERATIONS_KEY:+-H "Authorization: Bearer $KVRELAY_OPERATIONS_KEY"} \
        "$URL/metrics"
}

# show PATTERN: series that begin so and are not 0. Fails if there are none.
show() {
    metrics | grep -E "^$1" | grep -v ' 0\.0$'
}

# total PATTERN [CONDITION]: their sum. Fails unless the condition holds, such as "> 3".
total() {
    metrics | grep -E "^$1" | awk "{n += \$NF} END {print n + 0; exit !(n ${2:->= 0})}"
}

# Each worker: name, process, state, restarts, last error.
workers() {
    kvrelay status --url "$URL" --json | python3 -c '
import json, sys
for worker in json.load(sys.stdin)["workers"]:
    keys = ("worker", "pid", "state", "restarts", "last_error")
    print(*(worker.get(key, "") for key in keys))'
}

# Each router: name, process, state.
routers() {
    kvrelay status --url "$URL" --json | python3 -c '
import json, sys
for router in json.load(sys.stdin)["routers"]:
    print(*(router.get(key, "") for key in ("router", "pid", "state")))'
}

# Whether every worker takes requests.
all_up() {
    metrics | awk '/^kvrelay_worker_up/ {n++; up += $NF} END {exit !(n && up == n)}'
}

# Wait until every worker takes requests: two minutes, then it fails.
wait_up() {
    for _ in $(seq 120); do
        all_up && return
        sleep 1
    done
    return 1
}

# A request of one's own. Fails unless it is answered.
ask() {
    curl -sf -m 60 "$URL/v1/completions" -H 'Content-Type: application/json' \
        ${API_KEY:+-H "Authorization: Bearer $API_KEY"} \
        -d "{\"model\": \"$MODEL\", \"prompt\": \"Hello\", \"max_tokens\": 4}"
}
