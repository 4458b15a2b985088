"""Published interfaces of launchers: the options of Slurm, and the fields of a JobSet of Kubernetes."""

from __future__ import annotations

from typing import Any

_SBATCH = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment consolidate-segments
constraint container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task
deadline delay-boot dependency distribution error exclude exclusive export export-file extra extra-node-info
get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help
hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind
mem-per-cpu mem-per-gpu mem-update mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit
oversubscribe parsable partition prefer priority profile propagate qos quiet reboot requeue reservation
resources resv-ports runtime segment signal sockets-per-node spread-job spread-segments stepmgr switches
test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid usage use-min-nodes
verbose version wait wait-all-nodes wckey wrap
"""

SBATCH_OPTIONS = frozenset(_SBATCH.split())
"""Long options of sbatch, without dashes: the section OPTIONS of sbatch(1), Slurm 26.11
(doc/man/man1/sbatch.1).
"""

_SRUN = """
account acctg-freq async bb bbf bcast bcast-exclude begin chdir cluster-constraint clusters comment compress
consolidate-segments constraint container container-id contiguous core-spec cores-per-socket cpu-bind
cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency disable-status distribution epilog error
exact exclude exclusive export external-launcher extra extra-node-info gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags help het-group hint hold ignore-signals immediate input
job-name jobid kill-on-bad-exit label licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mem-update mincpus mpi msg-timeout multi-prog network nice no-allocate no-kill nodefile nodelist
nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output
overcommit overlap oversubscribe parsable partition prefer preserve-env priority profile prolog propagate
pty qos quiet quit-on-interrupt reboot relative reservation resources resv-ports runtime segment send-libs
signal slurmd-debug sockets-per-node spread-job spread-segments stepmgr switches task-epilog task-prolog
test-only thread-spec threads threads-per-core time time-min tmp treewidth tres-bind tres-per-task
unbuffered usage use-min-nodes verbose version wait wait-for-children wckey x11
"""

SRUN_OPTIONS = frozenset(_SRUN.split())
"""The same of srun(1)."""

Schema = dict[str, Any]

_TYPES: dict[str, Schema] = {
    "text": {"type": "string"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "count": {"type": "integer", "minimum": 0},
    "flag": {"type": "boolean"},
    "object": {"type": "object"},
    "list": {"type": "array"},
    "any": {},
}


def _object(*, required: tuple[str, ...] = (), others: str = "", **fields: Schema | str) -> Schema:
    """An object that has no fields but these: `others` are names of fields of any type."""
    typed = {name: _TYPES[kind] if isinstance(kind, str) else kind for name, kind in fields.items()}
    properties = {**{name: {} for name in others.split()}, **typed}
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False
    }  # fmt: skip


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_LABEL: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}

_METADATA = _object(others="namespace annotations", name=_LABEL, labels="object")

_CONTAINER = _object(
    required=("name",),
    others="env envFrom imagePullPolicy lifecycle livenessProbe ports readinessProbe resizePolicy"
    " restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce terminationMessagePath"
    " terminationMessagePolicy tty volumeDevices workingDir",
    name=_LABEL,
    image="text",
    command="texts",
    args="texts",
    resources=_object(claims="list", limits="object", requests="object"),
    volumeMounts=_list(
        _object(
            required=("name", "mountPath"),
            others="mountPropagation readOnly recursiveReadOnly subPath subPathExpr",
            name=_LABEL,
            mountPath="text",
        )
    ),
)

_POD = _object(
    required=("containers",),
    others="activeDeadlineSeconds affinity automountServiceAccountToken dnsConfig dnsPolicy"
    " enableServiceLinks ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname"
    " hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead preemptionPolicy"
    " priority priorityClassName readinessGates resourceClaims resources runtimeClassName schedulerName"
    " schedulingGates schedulingGroup securityContext serviceAccount serviceAccountName setHostnameAsFQDN"
    " shareProcessNamespace terminationGracePeriodSeconds tolerations topologySpreadConstraints",
    subdomain=_LABEL,
    restartPolicy={"enum": ["Never", "OnFailure"]},
    containers=_list(_CONTAINER),
    volumes=_list(
        _object(
            required=("name",),
            name=_LABEL,
            configMap=_object(others="defaultMode items optional", name=_LABEL),
            emptyDir=_object(others="sizeLimit", medium="text"),
        )
    ),
)

JOB = _object(
    required=("template",),
    others="activeDeadlineSeconds backoffLimitPerIndex managedBy manualSelector maxFailedIndexes"
    " podFailurePolicy podReplacementPolicy selector successPolicy ttlSecondsAfterFinished",
    backoffLimit="count",
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions="count",
    parallelism="count",
    suspend="flag",
    template=_object(metadata=_METADATA, spec=_POD),
)
"""The spec of a Job (batch/v1)."""

JOB_SET = _object(
    required=("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_METADATA,
    spec=_object(
        others="coordinator failurePolicy managedBy network startupPolicy successPolicy suspend"
        " ttlSecondsAfterFinished volumeClaimPolicies",
        replicatedJobs=_list(
            _object(
                required=("name", "template"),
                others="dependsOn groupName",
                name=_LABEL,
                replicas="count",
                template=_object(metadata=_METADATA, spec=JOB),
            )
        ),
    ),
)
"""A JobSet: the fields of the resource definition jobset.x-k8s.io, version v1alpha2
(kubernetes-sigs/jobset, charts/jobset/crds), and of the Job, pod and container inside it. Volumes are of the
two kinds that are written.
"""
