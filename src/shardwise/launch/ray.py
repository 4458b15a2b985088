"""Ray: a driver program that reserves the hosts and starts torchrun on each."""

from __future__ import annotations

from shardwise.launch.hosts import Launch

_DRIVER = '''\
"""Runs a plan on a Ray cluster: ray job submit --working-dir . -- python THIS_FILE"""

import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOSTS = {hosts}
DEVICES = {devices}


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def run(rank, head):
    subprocess.run(
        [{command}],
        check=True,
    )


ray.init()
group = placement_group([DEVICES] * HOSTS, strategy="STRICT_SPREAD")
ray.get(group.ready())


def on(rank):
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    return {{"num_cpus": DEVICES["CPU"], "num_gpus": DEVICES.get("GPU", 0), "scheduling_strategy": place}}


head = ray.get(address.options(**on(0)).remote())
ray.get([run.options(**on(rank)).remote(rank, head) for rank in range(HOSTS)])
'''


def ray_script(launch: Launch) -> str:
    """A Python program for `ray job submit`, whose working folder holds the plan."""
    processes = launch.processes_per_host("ray")
    devices = {"CPU": processes} if launch.gpu is None else {"CPU": 1, "GPU": processes}
    words = launch.command(rank="str(rank)", processes=processes, head="head", escape=repr)
    return _DRIVER.format(hosts=launch.hosts, devices=devices, command=", ".join(words))
