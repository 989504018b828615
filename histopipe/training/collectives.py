"""Collective operations of the workers of a training: find each other, gather arrays, compare settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.runs.workers import Cluster, in_cluster, slurm_tasks_per_node, tf_config


def find_cluster(environment: Mapping[str, str] = os.environ) -> Cluster:
    """Return the workers that `TF_CONFIG` names, or those of a Slurm job step; else this process alone.

    Raises:
        UsageError: the environment describes no valid cluster.
    """
    if not in_cluster(environment):
        return Cluster()
    config = tf_config(environment)
    if config is not None:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        index = int(config["task"]["index"])
        kind = config["task"]["type"]
    else:
        # Slurm shows each task its own GPUs, so the resolver gets one per task and must not select any.
        tasks = max(slurm_tasks_per_node(environment))
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
        )
        kind, index = "worker", int(environment["SLURM_PROCID"])
    spec = resolver.cluster_spec().as_dict()
    if set(spec) - {"chief", "worker"} or not 0 <= index < len(spec.get(kind, [])):
        raise UsageError(
            "TF_CONFIG", found=f"{', '.join(sorted(spec))}; this one is {kind} {index}",
            expected="workers, with or without a chief, and this one among them",
        )  # fmt: skip
    chiefs = spec.get("chief", [])
    workers = (*chiefs, *spec.get("worker", []))
    place = index if kind == "chief" else len(chiefs) + index
    return Cluster(workers, place, resolver)


def gathered(
    cluster: Cluster, strategy: tf.distribute.Strategy, values: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return the arrays of all workers joined along axis 1, in the order of the workers. All of them must call it.

    Args:
        strategy: of all workers.
        values: (S, N, F) float32; N may differ between workers.
    """
    if cluster.alone:
        return values
    parts = [values, *[values[:, :0]] * (len(cluster.own_part(strategy.num_replicas_in_sync)) - 1)]
    first = cluster.own_part(strategy.num_replicas_in_sync)[0]
    each = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[int(context.replica_id_in_sync_group) - first])
    )
    return np.asarray(strategy.gather(each, axis=1))


def check_same(cluster: Cluster, strategy: tf.distribute.Strategy, numbers: Sequence[int]) -> None:
    """Wait for all workers, and check that each has the same numbers, below 65,536.

    Raises:
        UsageError: a worker has other numbers than the first.
    """
    everyones = gathered(cluster, strategy, np.asarray([[numbers]], np.float32))[0]
    differing = [
        f"worker {index} ({cluster.workers[index]})"
        for index, theirs in enumerate(everyones)
        if not np.array_equal(theirs, everyones[0])
    ]
    if differing:
        raise UsageError(
            "the workers do not agree", found=f"{', '.join(differing)} other than the first",
            expected="the same settings, stores, splits and run folder everywhere",
        )  # fmt: skip
