# bash completion for kvctl; made by `make completions`, not by hand.
_kvctl_names() {
    # Compared here: compgen -W would have bash read the names.
    local name
    while IFS= read -r name; do
        [[ $name == "$2"* ]] && COMPREPLY+=("$name")
    done < <(timeout 0.2 kvctl __names $1 2>/dev/null)
}
_kvctl() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command= i
    # bash makes --output=json three words.
    [[ $current == = ]] && current=
    [[ $previous == = ]] && previous=${COMP_WORDS[COMP_CWORD-2]}
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
            --output|-o|--color|--timeout|--runtime-dir|--socket|--host|--context|--config) [[ ${COMP_WORDS[i+1]} == = ]] && ((i++)); ((i++)) ;;
            -*) ;;
            *) command=${COMP_WORDS[i]}; break ;;
        esac
    done
    case $command:$previous in
        agents:--engine|agents:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        agents:--peer) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        agents:--filter) COMPREPLY=(); return ;;
        agents:--sort) COMPREPLY=($(compgen -W "engine host rank pid backend own own-regions peer generation state since use lanes stuck reaches regions mapped pinned loads in-flight busy reason" -- "$current")); return ;;
        agents:--watch|agents:-w) COMPREPLY=(); return ;;
        bundle:--last|bundle:--limit|bundle:-n) COMPREPLY=(); return ;;
        bundle:--kvd-config) COMPREPLY=($(compgen -f -- "$current")); return ;;
        cache:--filter) COMPREPLY=(); return ;;
        cache:--sort) COMPREPLY=($(compgen -W "engine host generation blocks of groups hints each told busy given bytes lost taken taken-bytes missed sources reason" -- "$current")); return ;;
        cache:--watch|cache:-w) COMPREPLY=(); return ;;
        cache:--output|cache:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml name folded" -- "$current")); return ;;
        doctor:--from) COMPREPLY=($(compgen -f -- "$current")); return ;;
        doctor:--to) COMPREPLY=($(compgen -f -- "$current")); return ;;
        doctor:--peer) COMPREPLY=(); _kvctl_names hosts "$current"; return ;;
        engines:--state) COMPREPLY=($(compgen -W "ready partial gone unreachable" -- "$current")); return ;;
        engines:--role) COMPREPLY=($(compgen -W "prefill decode both" -- "$current")); return ;;
        engines:--model) COMPREPLY=(); return ;;
        engines:--filter) COMPREPLY=(); return ;;
        engines:--sort) COMPREPLY=($(compgen -W "name host model role state newest leases engine ranks shape since generation place groups scheduler policy served weights class peers reason" -- "$current")); return ;;
        engines:--watch|engines:-w) COMPREPLY=(); return ;;
        engines:--output|engines:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml name folded" -- "$current")); return ;;
        events:--count|events:--limit|events:-n) COMPREPLY=(); return ;;
        leases:--engine|leases:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        leases:--filter) COMPREPLY=(); return ;;
        leases:--sort) COMPREPLY=($(compgen -W "age left blocks engine host request side state held-by readers ends place" -- "$current")); return ;;
        leases:--watch|leases:-w) COMPREPLY=(); return ;;
        prefix:--tokens) COMPREPLY=(); return ;;
        prefix:--file) COMPREPLY=($(compgen -f -- "$current")); return ;;
        prefix:--output|prefix:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml name" -- "$current")); return ;;
        slow:--since) COMPREPLY=(); return ;;
        slow:--engine|slow:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        slow:--peer|slow:-p) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        slow:--backend) COMPREPLY=(); return ;;
        slow:--last|slow:--limit|slow:-n) COMPREPLY=(); return ;;
        slow:--from) COMPREPLY=(); return ;;
        slow:--watch|slow:-w) COMPREPLY=(); return ;;
        status:--sort) COMPREPLY=($(compgen -W "host version state started engines not-ready peers leases transfers misses" -- "$current")); return ;;
        status:--watch|status:-w) COMPREPLY=(); return ;;
        trace:--last|trace:--limit|trace:-n) COMPREPLY=(); return ;;
        trace:--engine|trace:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        trace:--peer|trace:-p) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        trace:--request|trace:-r) COMPREPLY=(); return ;;
        trace:--state) COMPREPLY=($(compgen -W "done miss" -- "$current")); return ;;
        trace:--backend) COMPREPLY=(); return ;;
        trace:--since) COMPREPLY=(); return ;;
        trace:--slower-than) COMPREPLY=(); return ;;
        trace:--name) COMPREPLY=(); return ;;
        trace:--report) COMPREPLY=($(compgen -f -- "$current")); return ;;
        transfer:--from) COMPREPLY=(); return ;;
        transfers:--last|transfers:--limit|transfers:-n) COMPREPLY=(); return ;;
        transfers:--engine|transfers:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        transfers:--peer|transfers:-p) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        transfers:--request|transfers:-r) COMPREPLY=(); return ;;
        transfers:--state) COMPREPLY=($(compgen -W "done miss" -- "$current")); return ;;
        transfers:--code) COMPREPLY=(); return ;;
        transfers:--backend) COMPREPLY=(); return ;;
        transfers:--checksum) COMPREPLY=($(compgen -W "ok differs unknown" -- "$current")); return ;;
        transfers:--since) COMPREPLY=(); return ;;
        transfers:--slower-than) COMPREPLY=(); return ;;
        transfers:--filter) COMPREPLY=(); return ;;
        transfers:--sort) COMPREPLY=($(compgen -W "newest slowest largest started request from to state bytes time rate seq transfer backend mode tokens copies stages checksum code cause" -- "$current")); return ;;
        transfers:--by) COMPREPLY=($(compgen -W "peer pair rank backend mode state code cause" -- "$current")); return ;;
        transfers:--from) COMPREPLY=(); return ;;
        transfers:--watch|transfers:-w) COMPREPLY=(); return ;;
        transfers:--output|transfers:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml name folded" -- "$current")); return ;;
        workers:--engine|workers:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        workers:--filter) COMPREPLY=(); return ;;
        workers:--sort) COMPREPLY=($(compgen -W "engine host state heard memory rank pid at backend regions registered incarnation reason" -- "$current")); return ;;
        workers:--watch|workers:-w) COMPREPLY=(); return ;;
        workers:--output|workers:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml name folded" -- "$current")); return ;;
        describe-topology:--model|describe-topology:-m) COMPREPLY=(); return ;;
        describe-topology:--local|describe-topology:--to) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        describe-topology:--remote|describe-topology:--from) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        describe-topology:--tokens) COMPREPLY=(); return ;;
        describe-topology:--bandwidth) COMPREPLY=(); return ;;
        describe-topology:--watch|describe-topology:-w) COMPREPLY=(); return ;;
        describe-topology:--output|describe-topology:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml dot mermaid svg" -- "$current")); return ;;
        probe:--count) COMPREPLY=(); return ;;
        benchmark:--model|benchmark:-m) COMPREPLY=(); return ;;
        benchmark:--local) COMPREPLY=(); return ;;
        benchmark:--remote) COMPREPLY=(); return ;;
        benchmark:--backend) COMPREPLY=(); return ;;
        benchmark:--operation) COMPREPLY=(); return ;;
        benchmark:--tokens) COMPREPLY=(); return ;;
        benchmark:--concurrency) COMPREPLY=(); return ;;
        benchmark:--fragmentation) COMPREPLY=(); return ;;
        benchmark:--rounds) COMPREPLY=(); return ;;
        benchmark:--memory) COMPREPLY=(); return ;;
        benchmark:--device) COMPREPLY=($(compgen -W "cpu cuda[:N][,cuda[:N]]" -- "$current")); return ;;
        benchmark:--report) COMPREPLY=($(compgen -f -- "$current")); return ;;
        benchmark:--to) COMPREPLY=(); _kvctl_names hosts "$current"; return ;;
        benchmark:--key-file) COMPREPLY=($(compgen -f -- "$current")); return ;;
        replay:--backend) COMPREPLY=(); return ;;
        replay:--env) COMPREPLY=(); return ;;
        replay:--speed) COMPREPLY=(); return ;;
        replay:--concurrency) COMPREPLY=(); return ;;
        replay:--limit|replay:-n) COMPREPLY=(); return ;;
        replay:--scale) COMPREPLY=(); return ;;
        replay:--memory) COMPREPLY=(); return ;;
        replay:--to) COMPREPLY=(); _kvctl_names hosts "$current"; return ;;
        replay:--key-file) COMPREPLY=($(compgen -f -- "$current")); return ;;
        replay:--report) COMPREPLY=($(compgen -f -- "$current")); return ;;
        serve:--memory) COMPREPLY=(); return ;;
        serve:--device) COMPREPLY=($(compgen -W "cpu cuda[:N]" -- "$current")); return ;;
        serve:--key-file) COMPREPLY=($(compgen -f -- "$current")); return ;;
        demo:--mode) COMPREPLY=($(compgen -W "pull push" -- "$current")); return ;;
        demo:--backend) COMPREPLY=($(compgen -W "nixl mooncake direct auto" -- "$current")); return ;;
        demo:--dir) COMPREPLY=($(compgen -f -- "$current")); return ;;
        force-miss:--engine|force-miss:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        force-miss:--next) COMPREPLY=(); return ;;
        force-miss:--ratio) COMPREPLY=(); return ;;
        force-miss:--seed) COMPREPLY=(); return ;;
        force-miss:--for) COMPREPLY=(); return ;;
        force-miss:--when) COMPREPLY=($(compgen -W "now before flight layers" -- "$current")); return ;;
        force-miss:--group) COMPREPLY=(); return ;;
        force-miss:--layer) COMPREPLY=(); return ;;
        force-miss:--rank) COMPREPLY=(); return ;;
        force-miss:--order) COMPREPLY=(); return ;;
        verify:--endpoint) COMPREPLY=(); return ;;
        verify:--prefill) COMPREPLY=(); return ;;
        verify:--router) COMPREPLY=(); return ;;
        verify:--engine|verify:-e) COMPREPLY=(); _kvctl_names engines "$current"; return ;;
        verify:--model) COMPREPLY=(); return ;;
        verify:--prompts) COMPREPLY=(); return ;;
        verify:--prompt-tokens) COMPREPLY=(); return ;;
        verify:--max-tokens) COMPREPLY=(); return ;;
        verify:--when) COMPREPLY=(); return ;;
        connector-config:--role) COMPREPLY=($(compgen -W "prefill decode both" -- "$current")); return ;;
        connector-config:--engine-id) COMPREPLY=(); return ;;
        connector-config:--policy) COMPREPLY=($(compgen -W "recompute fail" -- "$current")); return ;;
        connector-config:--backend) COMPREPLY=($(compgen -W "nixl mooncake direct auto staged" -- "$current")); return ;;
        connector-config:--mode) COMPREPLY=($(compgen -W "pull push" -- "$current")); return ;;
        connector-config:--set) COMPREPLY=(); return ;;
        drain:--grace) COMPREPLY=(); return ;;
        drain:--output|drain:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml name" -- "$current")); return ;;
        install-files:--prefix) COMPREPLY=($(compgen -f -- "$current")); return ;;
        install-files:--root) COMPREPLY=($(compgen -f -- "$current")); return ;;
        install-files:--programs) COMPREPLY=($(compgen -f -- "$current")); return ;;
        keys:--key-file) COMPREPLY=($(compgen -f -- "$current")); return ;;
        keys:--list) COMPREPLY=($(compgen -f -- "$current")); return ;;
        ports:--kvd-config) COMPREPLY=($(compgen -f -- "$current")); return ;;
        wait:--for) COMPREPLY=($(compgen -W "ready gone" -- "$current")); return ;;
        *:--output|*:-o) COMPREPLY=($(compgen -W "table wide json jsonl yaml" -- "$current")); return ;;
        *:--color) COMPREPLY=($(compgen -W "auto always never" -- "$current")); return ;;
        *:--timeout) COMPREPLY=(); return ;;
        *:--runtime-dir) COMPREPLY=($(compgen -f -- "$current")); return ;;
        *:--socket) COMPREPLY=($(compgen -f -- "$current")); return ;;
        *:--host) COMPREPLY=(); _kvctl_names hosts "$current"; return ;;
        *:--context) COMPREPLY=(); return ;;
        *:--config) COMPREPLY=($(compgen -f -- "$current")); return ;;
    esac
    local options= words= live=
    case $command in
        '')
            options='--version --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='agents bundle cache doctor engines events explain leases prefix slow status top trace transfer transfers workers describe-topology diff export-geometry probe benchmark replay serve demo force-miss verify connector-config context drain install-files keys ports wait completion schema version' ;;
        agents)
            options='--engine --peer --filter --sort --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help --force --yes'
            live=agents
            words='evict' ;;
        bundle)
            options='--last --limit --kvd-config --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        cache)
            options='--filter --sort --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        doctor)
            options='--quick --from --to --peer --fleet --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        engines)
            options='--state --role --model --local --filter --sort --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        events)
            options='--count --limit --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        explain)
            options='--output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='ADVERTISED_HOST_LOOPBACK BAD_PARAMS BETWEEN_STAGES BLOCK_GEOMETRY CHECKSUM_MISMATCH CLAIM_WAIT COMPARING COMPAT_MISMATCH CONNECTOR_REPLACED COPIES_WHILE_POSTING DECODER_REFUSES DESCRIPTOR_STORM DIRECT DISAGGREGATED DOES_NOT_FIT DRAINING ENGINES ENGINE_GONE ENGINE_ID_MISMATCH ENGINE_PARTIAL ENGINE_UNREACHABLE FAIL_OPEN_BUILD FILES FLEET_VERSION FORCED GID HANDSHAKE_ON_PATH HELD_UP IDLE_SOURCES INTERNAL KEYS KEYS_PAIR KEYS_SHARED KEYS_TWICE KEYS_UNREADABLE KEY_EXPECTED KEY_REFUSED KEY_REVOKED KVD KVD-ANSWER-LIMIT KVD-BACKEND KVD-BACKEND-LANDING KVD-BACKEND-METADATA KVD-BACKEND-REFUSED KVD-BACKEND-REGISTER KVD-BACKEND-UNAVAILABLE KVD-BACKEND-UNREACHABLE KVD-BAD-CARD KVD-BAD-ORDER KVD-BAD-PUSH KVD-BAD-QUERY KVD-BUSY KVD-CLIENT KVD-CLIENT-ERROR KVD-CLIENT-PROTOCOL KVD-COMPARE-LIMIT KVD-COMPARE-UNAVAILABLE KVD-CONNECTOR KVD-CONNECTOR-BUILD KVD-CONNECTOR-PARAMS KVD-CONNECTOR-PUSH KVD-CONNECTOR-SETTINGS KVD-CONNECTOR-SUMS KVD-CTL KVD-CTL-CHECK KVD-CTL-PERMISSION KVD-CTL-REFUSED KVD-CTL-TIMEOUT KVD-CTL-UNANSWERED KVD-CTL-UNREACHABLE KVD-CTL-USAGE KVD-DRAINING KVD-ENGINE-CONFLICT KVD-ENGINE-DRAINING KVD-ENGINE-GONE KVD-ENGINE-PARTIAL KVD-ENGINE-UNKNOWN KVD-EVICT-BUSY KVD-EVICT-UNKNOWN KVD-FORCE-BUSY KVD-FORCE-LATE KVD-FORCE-PART KVD-FORCE-POLICY KVD-FORCE-ROLE KVD-FORCE-UNKNOWN KVD-GEOMETRY KVD-GEOMETRY-BAD KVD-GEOMETRY-LAYER-IN-TWO-GROUPS KVD-GEOMETRY-NOT-TOLD KVD-GEOMETRY-UNEVEN KVD-GEOMETRY-UNKNOWN-SHAPE KVD-INCOMPATIBLE KVD-INTERNAL KVD-KEY-FILE KVD-KEY-NOT-TRUSTED KVD-KEY-REVOKED KVD-LEASE-UNKNOWN KVD-LEDGER KVD-NO-ENGINE KVD-NO-WAY-BACK KVD-NOT-DESCRIBED KVD-NOT-HERE KVD-NOT-OWNER KVD-NOT-PERMITTED KVD-NOT-REGISTERED KVD-NOT-TAKEN KVD-NOT-YOUR-ENGINE KVD-ORDER-UNKNOWN KVD-OWN-GENERATION KVD-PEER-ADDRESS KVD-PEER-CARD KVD-PEER-CONTRADICTION KVD-PEER-GENERATION KVD-PEER-PROTOCOL KVD-PEER-UNREACHABLE KVD-PROTOCOL KVD-QUESTION-TOO-LONG KVD-RANK-TAKEN KVD-RANK-UNKNOWN KVD-SETTINGS KVD-START KVD-STOCK-GARBAGE KVD-STOCK-MODEL KVD-STOCK-SILENT KVD-STOCK-UNREACHABLE KVD-TIMEOUT KVD-TOO-LARGE KVD-TOO-MANY KVD-TOO-MANY-READERS KVD-TOPOLOGY KVD-TOPOLOGY-BLOCKS KVD-TOPOLOGY-CHECKSUM KVD-TOPOLOGY-FIELD KVD-TOPOLOGY-LAYER KVD-TOPOLOGY-NOT-COVERED KVD-TOPOLOGY-OWN-ENGINE KVD-TOPOLOGY-TOO-MUCH KVD-TOPOLOGY-UNKNOWN-ENGINE KVD-TRACE KVD-TRACE-BAD KVD-TRACE-CUT KVD-TRACE-LARGE KVD-TRACE-NONE KVD-TRACE-VERSION KVD-UNENCODABLE KVD-UNREACHABLE KVD-WIRE KVD-WIRE-MALFORMED KVD-WIRE-UNKNOWN KVD-WIRE-VERSION KVD-WORKER-AWAY KVD-ZMTP KVD_DRAINING KVD_LOSSES KVD_PACE KVD_SLOW KVD_VERSION LATELY LAYERS_APART LAYOUT_MISMATCH LEASE_ENDED LEDGER_AWAY LEDGER_DAMAGED LISTENER LISTENER_DEAD LOADS_MISS LOAD_FAILURE_FAIL LONG_TAIL MANY_SMALL_COPIES MEMBERSHIP_AWAY MEMLOCK MISSES MODEL_UNKNOWN MOONCAKE NIXL NOBODY_ASKS NOT_ANSWERED NOT_DISAGGREGATED NOT_KEPT NOT_PUSHED NOT_SHOWN NO_KVD NO_PARAMS OTHER_PARAMS PAIR PAIRS PEERS PEER_ACCESS PEER_ANSWERS PEER_AWAY PEER_BACK PEER_BACKENDS PEER_CLOCK PEER_DOWN PEER_GONE PEER_KEY PEER_KEYS PEER_KEY_UNKNOWN PEER_MEMORY PEER_NO_SOCKET PEER_REFUSED PEER_REINCARNATED PEER_SILENT PEER_THERE PEER_TRANSPORT PEER_UNTRUSTED PEER_VERSION PLAN_COST POLICY_FAIL PORT_CLASH PORT_EPHEMERAL PORT_SHARED PORT_TAKEN PORT_TWICE PREFILLER_ENDED PREFILLER_KEEPS_NOTHING PREFILL_ENDED PREFIX_LOST PROMPT_MISMATCH PROMPT_UNCHECKED PTRACE QUEUE_WAIT RANK_NOT_REGISTERED RDMA RDMA_PORT REFUSED REPEATED_READS REQUEST_OVER RETRIES ROLES ROUTER_ASKS_FOR_NO_HANDOVER ROUTER_ASKS_NO_PREFILLER ROUTER_DROPS_PARAMS ROUTER_PASSES_BY SHARED_MEMORY SHUTDOWN SLOW_PATH STOCK_MODEL STOCK_PAIR STRAGGLER TOO_LATE TP_UNSUPPORTED TRANSFERS TRANSFER_FAILED TWO_LIBNL UCX_NO_CUDA UCX_TWO_COPIES UNCLAIMED UNEVEN_LOAD UNKNOWN UNUSED VERSION_SKEW WAITS_FOR_PREFILL WEIGHTS_UNKNOWN WINDOW_PARTIAL_BLOCK WORKER_SILENT' ;;
        leases)
            options='--engine --unclaimed --filter --sort --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help --yes'
            live=leases
            words='release' ;;
        prefix)
            options='--tokens --file --fleet --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        slow)
            options='--since --engine --peer --backend --last --limit --from --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        status)
            options='--fleet --sort --watch --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        top)
            options='--once --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        trace)
            options='--help --last --limit --engine --peer --request --state --backend --since --slower-than --hash-requests --output --color --timeout --runtime-dir --socket --host --context --config --name --replace --report'
            words='export import show' ;;
        transfer)
            options='--from --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        transfers)
            options='--last --limit --engine --peer --request --state --code --backend --checksum --since --slower-than --filter --sort --by --from --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        workers)
            options='--engine --filter --sort --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        describe-topology)
            options='--model --local --to --remote --from --tokens --bandwidth --fleet --watch --output --color --timeout --runtime-dir --socket --host --context --config --help'
            live=engines
            words='' ;;
        diff)
            options='--output --color --timeout --runtime-dir --socket --host --context --config --help'
            live=engines
            words='' ;;
        export-geometry)
            options='--output --color --timeout --runtime-dir --socket --host --context --config --help'
            live=engines
            words='' ;;
        probe)
            options='--count --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        benchmark)
            options='--model --local --remote --backend --operation --tokens --concurrency --fragmentation --rounds --memory --device --quick --no-verify --handshake --plot --report --to --key-file --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        replay)
            options='--backend --no-coalesce --env --speed --concurrency --limit --scale --memory --no-verify --to --key-file --report --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        serve)
            options='--memory --device --key-file --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        demo)
            options='--mode --backend --simulate --keep --loop --dir --keep-files --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        force-miss)
            options='--engine --waiting --next --ratio --seed --for --when --group --layer --rank --yes --wait --order --clear --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        verify)
            options='--endpoint --prefill --router --engine --model --prompts --prompt-tokens --max-tokens --when --yes --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        connector-config)
            options='--role --engine-id --policy --backend --mode --set --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        context)
            options='--help --output --color --timeout --runtime-dir --socket --host --context --config --none'
            words='list show use' ;;
        drain)
            options='--wait --undo --grace --output --color --timeout --runtime-dir --socket --host --context --config --help'
            live=engines
            words='ENGINE HOST' ;;
        install-files)
            options='--prefix --dry-run --root --programs --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        keys)
            options='--help --key-file --list --output --color --timeout --runtime-dir --socket --host --context --config --replace'
            words='generate revoke show trust' ;;
        ports)
            options='--all --kvd-config --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
        wait)
            options='--for --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='kvd engine/ID...' ;;
        completion)
            options='--help'
            words='bash zsh fish' ;;
        schema)
            options='--output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='Agent Agents Awaited Benchmark Bundle Bundled Cache Caches Check ClearedOrders CodeName Codes ConnectorConfig Context Contexts Demo DemoRequest Diff Doctor Drains Engine EngineDrain Engines Error Event EvictedLanes Eviction Explanation Explanations FleetAgent FleetAgents FleetCache FleetCaches FleetCheck FleetDoctor FleetEngine FleetEngines FleetGroups FleetHost FleetLease FleetLeases FleetPair FleetPrefixHolders FleetPrefixHolding FleetSlow FleetSlowPair FleetStatus FleetTopology FleetTransfer FleetTransfers FleetWorker FleetWorkers ForcedMiss ForcedRequest Geometry HandshakeBenchmark HostKeys InstalledFile InstalledFiles KeptTrace KindName Kinds Lease Leases ListeningSocket Pair Ports PrefixHolders PrefixHolding Probe ReleasedLease ReleasedLeases Replay Slow SlowPair Status Top Topology Trace Traces Transfer TransferGroup TransferGroups Transfers TrustedHost TrustedHosts Verification VerifiedRun Version Wait WholeTransfer Worker Workers' ;;
        version)
            options='--client --output --color --timeout --runtime-dir --socket --host --context --config --help'
            words='' ;;
    esac
    [[ $current == -* ]] && words=$options
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [[ $live && $current != -* ]] && _kvctl_names $live "$current"
}
complete -F _kvctl kvctl
